//! From styles to cuts and borders: which slice of each parameter a rank holds, and where rows move.

use std::collections::BTreeMap;
use std::ops::Range;

use phalanx_nn::{Describe, LowRank, Parameter, Placement, chunk};

use super::Tensor;
use super::style::{Site, Style, above, sites};
use crate::DistributedError;

type Result<T, E = DistributedError> = std::result::Result<T, E>;

/// A rank's slice of a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slice {
    /// The dimension that is cut, and the range of it; `None`: all of the parameter.
    pub cut: Option<(usize, Range<usize>)>,
    /// The ranks of the group that hold this slice.
    pub holders: Range<usize>,
    /// Whether the gradient that each of them forms is a part only.
    pub partial: bool,
}

impl Slice {
    /// The slice of a placement.
    pub(crate) fn of(&self, placement: Placement) -> Placement {
        match &self.cut {
            Some((dim, range)) => placement.slice(*dim, range.clone()),
            None => placement,
        }
    }
}

/// What moves when rows go into a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Input {
    /// Rows are gathered; gradients, of which each rank has a part, are summed while they go back.
    Gather,
    /// Rows are gathered; every rank has the whole gradient and keeps its rows.
    GatherForAll,
}

/// What moves when rows come out.
#[derive(Clone, Debug)]
pub(super) enum Output {
    /// The parts that ranks have are summed, each rank keeps its rows. With a bias that only one rank adds.
    ReduceScatter(Option<Parameter>),
    /// Every rank has all rows and keeps its own.
    Own,
}

/// The layout of a model over a tensor-parallel group, as one rank of it sees it.
pub(crate) struct Layout {
    ranks: usize,
    pub(super) inputs: BTreeMap<String, Input>,
    pub(super) outputs: BTreeMap<String, Output>,
    /// By parameter name.
    slices: BTreeMap<String, Slice>,
    /// Style and slice of the weight of linear layers, by path.
    linears: BTreeMap<String, (Style, Slice)>,
}

fn wrong<T>(what: String, mend: impl Into<String>) -> Result<T> {
    Err(DistributedError::Plan { what: format!("tensor: {what}"), mend: mend.into() })
}

impl Layout {
    /// The layout for rank `rank` of `ranks`.
    ///
    /// # Errors
    /// If a pattern matches nothing, a style does not fit its module, or a size cannot be cut into `ranks`.
    pub(crate) fn new(model: &dyn Describe, plan: &Tensor, ranks: usize, rank: usize) -> Result<Layout> {
        let sites = sites(model, &plan.styles)?;
        let mut layout = Layout {
            ranks,
            inputs: BTreeMap::new(),
            outputs: BTreeMap::new(),
            slices: BTreeMap::new(),
            linears: BTreeMap::new(),
        };
        if ranks == 1 {
            return Ok(layout);
        }
        let tree = Tree::new(sites)?;
        for (i, site) in tree.sites.iter().enumerate() {
            tree.check(i)?;
            layout.borders(&tree, i);
            for p in &site.parameters {
                let slice = layout.slice(&tree, i, p, rank)?;
                if site.kind == "linear" && p.shape().len() == 2 {
                    let style = site.style.unwrap_or(Style::Replicate);
                    layout.linears.insert(site.path.clone(), (style, slice.clone()));
                }
                let before = layout.slices.insert(p.name().to_owned(), slice.clone());
                if before.is_some_and(|before| before != slice) {
                    let what = format!(
                        "{} is used at two places that have different styles, the second {}",
                        p.name(),
                        site.path
                    );
                    return wrong(what, "name both in one line");
                }
            }
        }
        Ok(layout)
    }

    /// This rank's slice of a parameter of the model.
    pub(crate) fn slice_of(&self, p: &Parameter) -> Slice {
        self.slices.get(p.name()).cloned().unwrap_or(self.whole(false))
    }

    /// This rank's slices of A and B of the adapter beside the linear layer at `path`.
    pub(crate) fn slices_of_adapter(&self, path: &str, adapter: &LowRank) -> [(Parameter, Slice); 2] {
        let (a, b) = match self.linears.get(path) {
            // Outputs are cut, and so is B, which makes them; A gets a part of its gradient from each slice.
            Some((Style::Column, slice)) => (self.whole(true), slice.clone()),
            // Inputs are cut, and so is A, which takes them; B gets a part of its gradient from each.
            Some((Style::Row, slice)) => (slice.clone(), self.whole(true)),
            Some((Style::Sequence, _)) => (self.whole(true), self.whole(true)),
            _ => (self.whole(false), self.whole(false)),
        };
        [(adapter.a.clone(), a), (adapter.b.clone(), b)]
    }

    fn whole(&self, partial: bool) -> Slice {
        Slice { cut: None, holders: 0..self.ranks, partial: partial && self.ranks > 1 }
    }

    /// Where rows move at site `i`.
    fn borders(&mut self, tree: &Tree, i: usize) {
        let (site, path) = (&tree.sites[i], tree.sites[i].path.clone());
        if let Some(region) = &tree.regions[i] {
            self.inputs.insert(path, Input::Gather);
            let row = &tree.sites[region.row];
            let bias = row.parameters.iter().find(|p| p.shape().len() == 1).cloned();
            self.outputs.insert(row.path.clone(), Output::ReduceScatter(bias));
            return;
        }
        match site.style {
            Some(Style::Vocabulary) if site.kind == "embedding" => {
                self.outputs.insert(path, Output::ReduceScatter(None));
            }
            Some(Style::Vocabulary) => {
                self.inputs.insert(path, Input::Gather);
            }
            // The outermost of a replicated tree; norms of heads lie in a region, which has gathered.
            Some(Style::Replicate) if tree.stands_alone(i) => {
                if site.kind != "embedding" {
                    self.inputs.insert(path.clone(), Input::GatherForAll);
                }
                if site.kind != "head" {
                    self.outputs.insert(path, Output::Own);
                }
            }
            _ => {}
        }
    }

    /// The slice of `p`, a parameter of site `i`.
    fn slice(&self, tree: &Tree, i: usize, p: &Parameter, rank: usize) -> Result<Slice> {
        let site = &tree.sites[i];
        let cut = |dim, range| Slice { cut: Some((dim, range)), holders: rank..rank + 1, partial: false };
        match site.style {
            Some(Style::Vocabulary) => Ok(cut(0, chunk(p.shape()[0], self.ranks, rank))),
            Some(Style::Column | Style::Row) => {
                let Some(region) = site.parent.and_then(|parent| tree.regions[parent].as_ref()) else {
                    let what =
                        format!("{} is {}, with no other half beside it", site.path, site.style.unwrap_or(Style::Row));
                    return wrong(what, "a module is cut by column layers and one row layer that takes their outputs");
                };
                if site.style == Some(Style::Row) {
                    // The bias belongs to the sum: one rank adds it, and has its gradient.
                    if p.shape().len() == 1 {
                        return Ok(self.whole(true));
                    }
                    let (range, _) = region.cut(site, p.shape()[1], self.ranks, rank)?;
                    return Ok(cut(1, range));
                }
                let (range, holders) = region.cut(site, p.shape()[0], self.ranks, rank)?;
                let partial = holders.len() > 1;
                Ok(Slice { cut: Some((0, range)), holders, partial })
            }
            Some(Style::Sequence) => Ok(self.whole(true)),
            Some(Style::Replicate) => Ok(self.whole(tree.in_region(i))),
            None => wrong(
                format!("nothing is known of how {}, {} {}, is to be cut", site.path, article(site.kind), site.kind),
                format!("give it a style: tensor: {{styles: {{\"{}\": sequence}}}}", site.path),
            ),
        }
    }
}

/// A module whose inner width is cut.
struct Region {
    /// Its row layer.
    row: usize,
    /// Inner width: inputs of the row layer.
    width: usize,
    head_dim: Option<usize>,
}

/// The modules of a model, and which of them are cut.
struct Tree {
    sites: Vec<Site>,
    /// For each site, the region that it is.
    regions: Vec<Option<Region>>,
}

impl Tree {
    fn new(sites: Vec<Site>) -> Result<Tree> {
        let mut halves = vec![(vec![], vec![]); sites.len()];
        for (i, site) in sites.iter().enumerate() {
            match (site.style, site.kind) {
                (Some(Style::Column | Style::Row), "linear") | (Some(Style::Vocabulary), "embedding" | "head") => {}
                (Some(style @ (Style::Column | Style::Row)), _) => {
                    return misnamed(site, style, "column and row are for linear layers");
                }
                (Some(Style::Vocabulary), _) => {
                    return misnamed(site, Style::Vocabulary, "vocabulary is for the embedding and the head");
                }
                _ => {}
            }
            match (site.parent, site.style) {
                (Some(parent), Some(Style::Column)) => halves[parent].0.push(i),
                (Some(parent), Some(Style::Row)) => halves[parent].1.push(i),
                _ => {}
            }
        }
        let mut regions = vec![];
        for (i, (columns, rows)) in halves.into_iter().enumerate() {
            let path = &sites[i].path;
            let mend = "a module is cut by column layers and one row layer that takes their outputs";
            regions.push(match (columns.as_slice(), rows.as_slice()) {
                ([], []) => None,
                ([_, ..], &[row]) => {
                    let weight = sites[row].parameters.iter().find(|p| p.shape().len() == 2);
                    let width = weight.map_or(0, |w| w.shape()[1]);
                    Some(Region { row, width, head_dim: sites[i].head_dim })
                }
                (&[column, ..], rows) => {
                    let what = format!("{} is column, and {path} has {} row layers", sites[column].path, rows.len());
                    return wrong(what, mend);
                }
                ([], rows) => {
                    let what = format!("{} is row, and no layer of {path} is column", sites[rows[0]].path);
                    return wrong(what, mend);
                }
            });
        }
        Ok(Tree { sites, regions })
    }

    /// Whether a module around site `i` is cut.
    fn in_region(&self, i: usize) -> bool {
        let up = |&at: &usize| self.sites[at].parent;
        std::iter::successors(up(&i), up).any(|at| self.regions[at].is_some())
    }

    /// Whether site `i` is the outermost of a replicated tree.
    fn stands_alone(&self, i: usize) -> bool {
        !above(&self.sites, i).skip(1).any(|s| s.style == Some(Style::Replicate)) && !self.in_region(i)
    }

    /// Whether the style of site `i` fits what it is and where it lies.
    fn check(&self, i: usize) -> Result<()> {
        let site = &self.sites[i];
        let Some(style) = site.style else { return Ok(()) };
        let inside = self.in_region(i);
        let why = match (style, site.kind) {
            (Style::Sequence, _) if inside => "a module around it is cut and has gathered all rows",
            (Style::Sequence, "embedding" | "head" | "model") => {
                "it is at the border of the model, where all tokens are"
            }
            (Style::Sequence, _) if above(&self.sites, i).any(|s| s.head_dim.is_some()) => {
                "attention sees all rows of a sequence"
            }
            (Style::Replicate, kind) if inside && kind != "norm" => "a module around it is cut, and its layers with it",
            (Style::Replicate, "model") => "then nothing is left to be cut",
            _ => return Ok(()),
        };
        wrong(
            format!("{} is {} {}, named {style}: {why}", site.path, article(site.kind), site.kind),
            "correct its line",
        )
    }
}

impl Region {
    /// What rank `rank` of `ranks` holds of `width` inputs or outputs of a layer in the region, and the ranks that hold the same.
    fn cut(&self, site: &Site, width: usize, ranks: usize, rank: usize) -> Result<(Range<usize>, Range<usize>)> {
        let size = self.head_dim.unwrap_or(1);
        let (pieces, unit) = (width / size, if size > 1 { "heads" } else { "units" });
        let whole = if self.head_dim.is_some() { "self_attn" } else { "mlp" };
        if pieces.is_multiple_of(ranks) && width.is_multiple_of(size) {
            let each = pieces / ranks * size;
            return Ok((each * rank..each * (rank + 1), rank..rank + 1));
        }
        if width != self.width && self.head_dim.is_some() && pieces > 0 && ranks.is_multiple_of(pieces) {
            // Fewer key heads than ranks: those whose query heads attend to one have it together.
            let each = ranks / pieces;
            let head = rank / each;
            return Ok((head * size..(head + 1) * size, head * each..(head + 1) * each));
        }
        let inner = self.width / size;
        let fits = |t: &usize| inner.is_multiple_of(*t) && (pieces.is_multiple_of(*t) || t.is_multiple_of(pieces));
        let fits: Vec<String> = (1..=inner).filter(|t| pieces > 0 && fits(t)).map(|t| t.to_string()).collect();
        wrong(
            format!("the {pieces} {unit} of {} cannot be cut into tp = {ranks}", site.path),
            format!(
                "choose tp among {}, or keep the module whole: styles: {{\"**.{whole}\": replicate}}",
                fits.join(", ")
            ),
        )
    }
}

fn misnamed<T>(site: &Site, style: Style, why: &str) -> Result<T> {
    let Site { path, kind, .. } = site;
    wrong(format!("{path} is {} {kind}, named {style}: {why}", article(kind)), "correct its line")
}

fn article(kind: &str) -> &'static str {
    if kind.starts_with(['a', 'e', 'i', 'o', 'u']) || kind == "mlp" { "an" } else { "a" }
}
