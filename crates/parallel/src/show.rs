//! The resolved plan as a tree for people.

use std::fmt::Write;

use phalanx_nn::{Arithmetic, ModuleSettings, ResolvedPlan};

use crate::Site;

/// One line a module; blocks that are set alike are drawn once.
pub fn show(model: &[Site], plan: &ResolvedPlan) -> String {
    let mut out = String::new();
    let mut i = 0;
    while i < model.len() {
        let site = &model[i];
        let n = subtree(model, i);
        // How many subtrees from here on are the same but for their number?
        let mut same = 1;
        while site.kind == "block"
            && i + (same + 1) * n <= model.len()
            && model[i + same * n].kind == "block"
            && subtree(model, i + same * n) == n
            && (0..n).all(|k| alike(model, plan, i + k, i + same * n + k))
        {
            same += 1;
        }
        if same > 1 {
            let (first, last) = (number(&site.path), number(&model[i + (same - 1) * n].path));
            let stem = site.path.rsplit_once('.').map_or("", |(s, _)| s);
            line(&mut out, &format!("{stem}.{{{first}-{last}}}"), site, plan, 0);
            for k in 1..n {
                let name = model[i + k].path[site.path.len() + 1..].to_owned();
                line(&mut out, &name, &model[i + k], plan, 1 + name.matches('.').count());
            }
            i += same * n;
        } else {
            line(&mut out, &site.path, site, plan, 0);
            i += 1;
        }
    }
    out
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
