//! The resolved plan as a tree for people.

use std::fmt::Write;

use phalanx_nn::{Arithmetic, ModuleSettings, ResolvedPlan};

use crate::Site;

/// One line a module; blocks, and experts of a block, that are set alike are drawn once.
pub fn show(model: &[Site], plan: &ResolvedPlan) -> String {
    let mut out = String::new();
    section(&mut out, model, plan, 0..model.len(), ("", ""), 0);
    out
}

/// Sites of a range, in whose paths `from` is drawn as `to`.
fn section(
    out: &mut String,
    model: &[Site],
    plan: &ResolvedPlan,
    range: std::ops::Range<usize>,
    (from, to): (&str, &str),
    depth: usize,
) {
    let mut i = range.start;
    while i < range.end {
        let site = &model[i];
        let name = format!("{to}{}", &site.path[from.len()..]);
        let indent = if depth == 0 { 0 } else { depth + name.matches('.').count() };
        let (n, same) = repeated(model, plan, i, range.end);
        if same == 1 {
            line(out, &name, site, plan, indent);
            i += 1;
            continue;
        }
        let (first, last) = (number(&site.path), number(&model[i + (same - 1) * n].path));
        let stem = name.rsplit_once('.').map_or("", |(s, _)| s);
        let many = format!("{stem}.{{{first}-{last}}}");
        line(out, &many, site, plan, indent);
        // What is in a block is named from there on; what is in an expert still needs the block's part of its name.
        let to = if site.kind == "block" { String::new() } else { format!("{many}.") };
        section(out, model, plan, i + 1..i + n, (&format!("{}.", site.path), &to), depth.max(1));
        i += same * n;
    }
}

/// The sites of the subtree at `i`, and how many subtrees from there on are the same but for their number.
fn repeated(model: &[Site], plan: &ResolvedPlan, i: usize, end: usize) -> (usize, usize) {
    let kind = model[i].kind.as_str();
    if !matches!(kind, "block" | "expert") {
        return (1, 1);
    }
    let n = subtree(model, i);
    let mut same = 1;
    while i + (same + 1) * n <= end
        && model[i + same * n].kind == kind
        && subtree(model, i + same * n) == n
        && (0..n).all(|k| alike(model, plan, i + k, i + same * n + k))
    {
        same += 1;
    }
    (n, same)
}

fn number(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or("")
}

fn subtree(model: &[Site], i: usize) -> usize {
    let prefix = format!("{}.", model[i].path);
    1 + model[i + 1..].iter().take_while(|s| s.path.starts_with(&prefix)).count()
}

fn alike(model: &[Site], plan: &ResolvedPlan, a: usize, b: usize) -> bool {
    model[a].kind == model[b].kind && plan.modules.get(&model[a].path) == plan.modules.get(&model[b].path)
}

fn line(out: &mut String, name: &str, site: &Site, plan: &ResolvedPlan, depth: usize) {
    let s = plan.modules.get(&site.path).cloned().unwrap_or_default();
    let label = format!("{:indent$}{name}", "", indent = 2 * depth);
    let _ = writeln!(out, "{label:<44} {:<10} {}", site.kind, words(site, &s));
}

fn words(site: &Site, s: &ModuleSettings) -> String {
    let mut w = Vec::new();
    if !site.parameters.is_empty() {
        w.push(s.precision.to_string());
        w.push(if s.trainable { "trained".into() } else { "frozen".into() });
    }
    if matches!(site.kind.as_str(), "linear" | "head") && s.arithmetic != Arithmetic::F32 {
        let at_random = if s.stochastic_gradients { ", gradients rounded at random" } else { "" };
        w.push(format!("{} products{at_random}", s.arithmetic));
    }
    if s.adapter {
        w.push("+ adapter".into());
    }
    if s.recompute {
        w.push("recomputed".into());
    }
    w.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Plan, resolve};

    #[test]
    fn equal_blocks_are_drawn_once() {
        let mut model = vec![Site::new("model", "model", &[])];
        for i in 0..4 {
            model.push(Site::new(&format!("model.layers.{i}"), "block", &[]));
            let w = format!("model.layers.{i}.up.weight");
            model.push(Site::new(&format!("model.layers.{i}.up"), "linear", &[&w]));
        }
        let plan: Plan = serde_json::from_str(r#"{"freeze": "model.layers.0"}"#).unwrap();
        let text = show(&model, &resolve(&model, &plan).unwrap());
        assert!(text.contains("model.layers.{1-3}") && text.contains("model.layers.0 "), "{text}");
        assert_eq!(text.lines().count(), 5, "{text}");
    }
}
