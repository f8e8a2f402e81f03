//! Which values of a matrix share a scale.

use crate::Result;
use crate::error::bad_shape;

/// Columns that a quantiser looks at together; a tile is not wider.
pub(crate) const MAX_TILE_COLS: usize = 512;

/// The values that share a scale. Tiles start at the matrix's corner; the last of a row or column may be cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tile {
    /// One scale for the whole tensor.
    Tensor,
    /// One scale for each rectangle.
    Block {
        /// Rows of a rectangle, at least 1.
        rows: usize,
        /// Columns of a rectangle, 1 ..= 512.
        cols: usize,
    },
}

impl Tile {
    /// 128 values along a row: activations and gradients whose columns are summed over.
    pub const ROW_128: Tile = Tile::Block { rows: 1, cols: 128 };
    /// 128 values along a column: the same where rows are summed over (the weight gradient).
    pub const COLUMN_128: Tile = Tile::Block { rows: 128, cols: 1 };
    /// 128 × 128: weights, the same in both orientations.
    pub const SQUARE_128: Tile = Tile::Block { rows: 128, cols: 128 };
    /// 32 values along a row: MX formats.
    pub const ROW_32: Tile = Tile::Block { rows: 1, cols: 32 };
    /// 32 values along a column: MX formats where rows are summed over.
    pub const COLUMN_32: Tile = Tile::Block { rows: 32, cols: 1 };

    /// The tile of the transposed matrix that holds the same values.
    pub const fn transposed(self) -> Tile {
        match self {
            Tile::Tensor => Tile::Tensor,
            Tile::Block { rows, cols } => Tile::Block { rows: cols, cols: rows },
        }
    }

    /// Rows and columns of scales of a matrix [rows, cols]; scales lie row-major. 1 × 1 for [`Tile::Tensor`], even if it is
    /// empty.
    pub const fn grid(self, rows: usize, cols: usize) -> (usize, usize) {
        match self {
            Tile::Tensor => (1, 1),
            Tile::Block { rows: r, cols: c } => (rows.div_ceil(r), cols.div_ceil(c)),
        }
    }

    /// Number of scales of a matrix [rows, cols].
    pub const fn scales(self, rows: usize, cols: usize) -> usize {
        let (r, c) = self.grid(rows, cols);
        r * c
    }

    pub(crate) fn check(self, kernel: &'static str) -> Result<()> {
        match self {
            Tile::Block { rows, cols } if rows == 0 || !(1..=MAX_TILE_COLS).contains(&cols) => bad_shape(
                kernel,
                format!("a tile of {rows} × {cols}: rows must be at least 1, columns 1..={MAX_TILE_COLS}"),
            ),
            _ => Ok(()),
        }
    }
}
