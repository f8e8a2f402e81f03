//! How a module lies over the ranks of a tensor-parallel group.

use phalanx_nn::{Describe, Parameter, Walk};
use serde::{Deserialize, Serialize};

use crate::{DistributedError, Pattern};

/// How a module lies over the ranks of a tensor-parallel group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Style {
    /// Linear layer: each rank has some of the outputs.
    Column,
    /// Linear layer: each rank has some of the inputs; what they give is summed.
    Row,
    /// Embedding or head: each rank has some rows of the vocabulary.
    Vocabulary,
    /// Every rank has all of it. As a module by itself it sees all rows, and every rank computes the same: for what cannot be cut.
    Replicate,
    /// Every rank has all of it and runs it on its share of the rows: for what sees each row alone.
    Sequence,
}

impl Style {
    /// Its name in a plan.
    pub const fn name(self) -> &'static str {
        match self {
            Style::Column => "column",
            Style::Row => "row",
            Style::Vocabulary => "vocabulary",
            Style::Replicate => "replicate",
            Style::Sequence => "sequence",
        }
    }

    /// The style that a module has without a line in the plan, by its last name and kind; `None` where there is nothing to cut, or nothing is known.
    ///
    /// | module | style |
    /// |---|---|
    /// | `q_proj`, `k_proj`, `v_proj`, `gate_proj`, `up_proj` | column |
    /// | `o_proj`, `down_proj` | row |
    /// | embedding, head | vocabulary |
    /// | norm | sequence; of heads, inside attention, replicate |
    pub fn usual(name: &str, kind: &str, in_attention: bool) -> Option<Style> {
        match (kind, name) {
            ("linear", "q_proj" | "k_proj" | "v_proj" | "gate_proj" | "up_proj") => Some(Style::Column),
            ("linear", "o_proj" | "down_proj") => Some(Style::Row),
            ("embedding" | "head", _) => Some(Style::Vocabulary),
            ("norm", _) => Some(if in_attention { Style::Replicate } else { Style::Sequence }),
            _ => None,
        }
    }
}

impl std::fmt::Display for Style {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// A module with its style.
pub(super) struct Site {
    pub path: String,
    pub kind: &'static str,
    pub head_dim: Option<usize>,
    /// Its own.
    pub parameters: Vec<Parameter>,
    pub style: Option<Style>,
    /// Position of the module that it is part of, among all.
    pub parent: Option<usize>,
}

/// All modules, outermost first, with the styles that `lines` give them, or the usual ones.
pub(super) fn sites(model: &dyn Describe, lines: &[(String, Style)]) -> Result<Vec<Site>, DistributedError> {
    let lines = lines
        .iter()
        .map(|(text, style)| Ok((text, Pattern::parse(text)?, *style)))
        .collect::<Result<Vec<_>, DistributedError>>()?;
    let mut sites: Vec<Site> = vec![];
    phalanx_nn::walk(model, &mut |event| match event {
        Walk::Module(path, module) => {
            let parent = sites.iter().rposition(|s| is_below(path, &s.path));
            sites.push(Site {
                path: path.to_owned(),
                kind: module.kind(),
                head_dim: module.head_dim(),
                parameters: vec![],
                style: None,
                parent,
            });
        }
        Walk::Parameter(path, p) => {
            if let Some(site) = sites.iter_mut().rfind(|s| s.path == path) {
                site.parameters.push(p.clone());
            }
        }
    });
    let mut used = vec![false; lines.len()];
    for i in 0..sites.len() {
        // Of the lines that name it or something around it, the last wins.
        let mut style = None;
        for (line, hit) in lines.iter().zip(&mut used) {
            if above(&sites, i).any(|s| line.1.matches(&s.path)) {
                (*hit, style) = (true, Some(line.2));
            }
        }
        let site = &sites[i];
        let name = site.path.rsplit('.').next().unwrap_or_default();
        let in_attention = above(&sites, i).any(|s| s.head_dim.is_some());
        let style = style.or_else(|| Style::usual(name, site.kind, in_attention));
        sites[i].style = style;
    }
    if let Some((text, ..)) = lines.iter().zip(&used).find(|(_, used)| !**used).map(|(line, _)| line) {
        return Err(DistributedError::Plan {
            what: format!("tensor.styles: pattern \"{text}\" matches no module"),
            mend: "`phalanx plan show` lists the modules".into(),
        });
    }
    Ok(sites)
}

fn is_below(path: &str, root: &str) -> bool {
    path.strip_prefix(root).is_some_and(|rest| rest.starts_with('.'))
}

/// Site `i`, then what it is part of, inside out.
pub(super) fn above(sites: &[Site], i: usize) -> impl Iterator<Item = &Site> {
    std::iter::successors(Some(&sites[i]), |s| s.parent.map(|p| &sites[p]))
}
