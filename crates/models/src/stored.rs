//! Where a parameter lies in a folder: a tensor of its name, or a piece of one that holds all experts of a block.
//!
//! Files of experts come in two forms: one tensor for each projection of each expert (what `transformers` writes), and stacked,
//! `….experts.gate_up_proj` [E, 2·I, H] and `….experts.down_proj` [E, H, I] (what it holds in memory, and other programs write).

use phalanx_formats::{TensorView, WeightFolder};
use phalanx_nn::Parameter;

use crate::Result;

/// Shapes that the file must have for the parameters, each once: stacked where the file is.
pub(crate) fn expected(folder: &WeightFolder, params: &[Parameter]) -> Vec<(String, Vec<usize>)> {
    let mut out: Vec<(String, Vec<usize>)> = Vec::with_capacity(params.len());
    let mut at = std::collections::HashMap::new();
    for p in params {
        match Piece::of(folder, p) {
            None => out.push((p.name().to_owned(), p.shape().to_vec())),
            Some(piece) => {
                let i = *at.entry(piece.stacked.clone()).or_insert_with(|| {
                    out.push((piece.stacked.clone(), vec![0, piece.parts * p.shape()[0], p.shape()[1]]));
                    out.len() - 1
                });
                out[i].1[0] = out[i].1[0].max(piece.expert + 1);
            }
        }
    }
    out
}

/// A parameter's piece of a stacked tensor.
struct Piece {
    stacked: String,
    expert: usize,
    /// Projections that lie one after another for each expert.
    parts: usize,
    part: usize,
}

impl Piece {
    fn of(folder: &WeightFolder, p: &Parameter) -> Option<Piece> {
        if folder.contains(p.name()) || p.shape().len() != 2 {
            return None;
        }
        let (stem, rest) = p.name().split_once(".experts.")?;
        let (expert, projection) = rest.strip_suffix(".weight")?.split_once('.')?;
        let (name, parts, part) = match projection {
            "gate_proj" => ("gate_up_proj", 2, 0),
            "up_proj" => ("gate_up_proj", 2, 1),
            "down_proj" => ("down_proj", 1, 0),
            _ => return None,
        };
        let stacked = format!("{stem}.experts.{name}");
        let expert = expert.parse().ok()?;
        folder.contains(&stacked).then_some(Piece { stacked, expert, parts, part })
    }
}

/// The values of a parameter in a folder whose names and shapes have been checked.
pub(crate) fn find<'a>(folder: &'a WeightFolder, p: &'a Parameter) -> Result<TensorView<'a>> {
    let Some(piece) = Piece::of(folder, p) else { return Ok(folder.get(p.name())?) };
    let all = folder.get(&piece.stacked)?;
    let bytes = all.bytes.len() / all.num_elements().max(1) * p.len();
    let start = (piece.expert * piece.parts + piece.part) * bytes;
    Ok(TensorView { name: p.name(), shape: p.shape(), bytes: &all.bytes[start..start + bytes], ..all })
}
