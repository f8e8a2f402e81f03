//! (model, plan) → settings of each module, or conflicts.

use std::collections::BTreeMap;
use std::fmt;

use phalanx_nn::{Arithmetic, Describe, ModuleSettings, ResolvedPlan};
use phalanx_tensor::DType;

use crate::compatibility::{Feature, Verdict, verdict};
use crate::{Exactness, Pattern, Plan};

/// A module as resolving sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// Scope path.
    pub path: String,
    /// Kind, as [`phalanx_nn::Describe::kind`].
    pub kind: String,
    /// Names of its own parameters.
    pub parameters: Vec<String>,
}

impl Site {
    /// A site from its parts.
    pub fn new(path: &str, kind: &str, parameters: &[&str]) -> Site {
        Site { path: path.into(), kind: kind.into(), parameters: parameters.iter().map(|&p| p.into()).collect() }
    }
}

/// The sites of a model, outermost first.
pub fn sites(model: &dyn Describe) -> Vec<Site> {
    let mut out: Vec<Site> = Vec::new();
    phalanx_nn::walk(model, &mut |event| match event {
        phalanx_nn::Walk::Module(path, module) => out.push(Site::new(path, module.kind(), &[])),
        phalanx_nn::Walk::Parameter(path, p) => {
            if let Some(site) = out.iter_mut().rev().find(|s| s.path == path) {
                site.parameters.push(p.name().to_owned());
            }
        }
    });
    out
}

/// Something a plan asks for that cannot be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// What clashes, naming the features, pattern or module.
    pub what: String,
    /// What to do.
    pub mend: String,
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "plan: {}; {}", self.what, self.mend)
    }
}

fn below(path: &str, root: &str) -> bool {
    path == root || (path.starts_with(root) && path.as_bytes()[root.len()] == b'.')
}

/// Settings of every module, or everything that is wrong.
///
/// # Errors
/// A pattern that cannot be read or matches nothing, features that exclude each other on a module, nothing left to train.
pub fn resolve(model: &[Site], plan: &Plan) -> Result<ResolvedPlan, Vec<Conflict>> {
    let mut conflicts = Vec::new();
    let mut unmatched = false;
    let mut find = |key: &str, patterns: &[String]| -> Vec<usize> {
        let mut hit = Vec::new();
        for text in patterns {
            match Pattern::parse(text) {
                Err(e) => conflicts.push(Conflict { what: format!("{key}: {e}"), mend: "correct the pattern".into() }),
                Ok(p) => {
                    let found: Vec<usize> = (0..model.len()).filter(|&i| p.matches(&model[i].path)).collect();
                    if found.is_empty() {
                        unmatched = true;
                        conflicts.push(Conflict {
                            what: format!("{key}: pattern \"{text}\" matches no module"),
                            mend: nearest_module(model, text),
                        });
                    }
                    hit.extend(found);
                }
            }
        }
        hit.sort_unstable();
        hit.dedup();
        hit
    };
    let frozen = find("freeze", &plan.freeze);
    let trained = find("train", &plan.train);
    let adapted = find("adapters", &plan.adapters);
    let recomputed = find("recompute", &plan.recompute);
    let precision: Vec<_> =
        plan.precision.iter().map(|(p, v)| (find("precision", std::slice::from_ref(p)), *v)).collect();

    let arithmetic: Vec<_> =
        plan.arithmetic.iter().map(|(p, v)| (find("arithmetic", std::slice::from_ref(p)), *v)).collect();

    let inside = |i: usize, roots: &[usize]| roots.iter().any(|&r| below(&model[i].path, &model[r].path));
    let restricts = !plan.train.is_empty() || !plan.adapters.is_empty();
    let mut modules = BTreeMap::new();
    for (i, site) in model.iter().enumerate() {
        let mut s = ModuleSettings {
            trainable: (!restricts || inside(i, &trained)) && !inside(i, &frozen),
            adapter: adapted.contains(&i),
            recompute: recomputed.contains(&i),
            ..ModuleSettings::default()
        };
        for (roots, p) in &precision {
            if inside(i, roots) {
                s.precision = (*p).into();
            }
        }
        // Who stores 16 bits expects products of 16 bits, as everywhere else; a line of `arithmetic` may say otherwise.
        if s.precision == DType::Bf16 {
            s.arithmetic = Arithmetic::Bf16;
        }
        for (roots, e) in &arithmetic {
            if inside(i, roots) {
                // A block recipe is for the blocks; the head stays at 16 bits, as where the recipe comes from.
                let recipe = Arithmetic::from(*e).is_block_recipe();
                let e = if recipe && site.kind == "head" { Exactness::Bf16 } else { *e };
                s.arithmetic = e.into();
                s.stochastic_gradients = e == Exactness::Int8BlockStochastic;
            }
        }
        if s.adapter && site.kind == "expert_linear" {
            conflicts.push(Conflict {
                what: format!(
                    "adapters: {} belongs to an expert; adapters beside experts are not supported yet",
                    site.path
                ),
                mend: "name other layers, for instance **.self_attn.*_proj".into(),
            });
        } else if s.adapter && site.kind != "linear" {
            conflicts.push(Conflict {
                what: format!(
                    "adapters: {} is {}, adapters sit beside linear layers",
                    site.path,
                    with_article(&site.kind)
                ),
                mend: "narrow the pattern, for instance to **.*_proj".into(),
            });
        }
        if s.adapter && s.trainable {
            conflicts.extend(clash(Feature::Freeze, Feature::Adapters, &site.path));
        }
        if s.recompute && !matches!(site.kind.as_str(), "block" | "attention" | "mlp" | "norm" | "linear") {
            conflicts.push(Conflict {
                what: format!(
                    "recompute: {} is {}, which has no single forward to repeat",
                    site.path,
                    with_article(&site.kind)
                ),
                mend: "name blocks, for instance model.layers.{*}".into(),
            });
        }
        if s.recompute && recomputed.iter().any(|&r| r != i && below(&site.path, &model[r].path)) {
            conflicts.extend(clash(Feature::Recompute, Feature::Recompute, &site.path));
        }
        modules.insert(site.path.clone(), s);
    }
    conflicts.extend(experts(model, &modules));
    conflicts.extend(tied(model, &modules));
    let own = |s: &Site| modules.get(&s.path).is_some_and(|m| m.adapter || (m.trainable && !s.parameters.is_empty()));
    // A pattern without a module leaves nothing to train as well; its own message is the one that helps.
    if !unmatched && !model.iter().any(own) {
        conflicts.push(Conflict {
            what: "nothing is left to train".into(),
            mend: "take something out of `freeze`, or name it in `train` or `adapters`".into(),
        });
    }
    if conflicts.is_empty() { Ok(ResolvedPlan { modules }) } else { Err(conflicts) }
}

/// The module whose last name is nearest to the pattern's.
fn nearest_module(model: &[Site], pattern: &str) -> String {
    let last = |path: &str| path.rsplit('.').next().unwrap_or(path).to_owned();
    let wanted = last(pattern);
    let limit = (wanted.chars().count() / 3).max(1);
    let near = model
        .iter()
        .map(|s| last(&s.path))
        .filter(|name| name.parse::<u32>().is_err())
        .map(|name| (strsim::osa_distance(&wanted, &name), name))
        .filter(|(distance, _)| *distance <= limit)
        .min_by_key(|(distance, _)| *distance);
    match near {
        Some((distance, name)) if distance > 0 => {
            format!("did you mean `{name}`? `phalanx plan show` lists the modules")
        }
        _ => {
            let known = model.iter().take(4).map(|s| s.path.as_str()).collect::<Vec<_>>().join(", ");
            format!("`phalanx plan show` lists the modules ({known}, …)")
        }
    }
}

fn with_article(kind: &str) -> String {
    let article = if kind.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
    format!("{article} {kind}")
}

fn clash(a: Feature, b: Feature, path: &str) -> Option<Conflict> {
    match verdict(a, b) {
        Verdict::Allowed => None,
        Verdict::NotOnOneModule { why, mend } => {
            Some(Conflict { what: format!("{a} and {b} on {path}: {why}"), mend: mend.into() })
        }
    }
}

/// The products of a block's experts are made together, so they are made alike.
fn experts(model: &[Site], modules: &BTreeMap<String, ModuleSettings>) -> Vec<Conflict> {
    let mut all: Option<&Site> = None;
    let mut out = Vec::new();
    for site in model {
        match site.kind.as_str() {
            "experts" => all = Some(site),
            "expert_linear" => {
                let Some(all) = all.filter(|all| below(&site.path, &all.path)) else { continue };
                let how = |s: &Site| (modules[&s.path].arithmetic, modules[&s.path].stochastic_gradients);
                if how(site) != how(all) {
                    out.push(Conflict {
                        what: format!("arithmetic: {} differs from the other experts of its block", site.path),
                        mend: format!("name all of them: {}", all.path),
                    });
                    return out;
                }
            }
            _ => {}
        }
    }
    out
}

/// One parameter at two places (a tied head) must be treated the same at both.
fn tied(model: &[Site], modules: &BTreeMap<String, ModuleSettings>) -> Vec<Conflict> {
    let mut seen: BTreeMap<&str, &str> = BTreeMap::new();
    let mut out = Vec::new();
    for site in model {
        for p in &site.parameters {
            if let Some(first) = seen.insert(p, &site.path) {
                let (a, b) = (&modules[first], &modules[&site.path]);
                if (a.trainable, a.precision) != (b.trainable, b.precision) {
                    out.push(Conflict {
                        what: format!(
                            "{p} is used by {first} and {} (tied), which the plan treats differently",
                            site.path
                        ),
                        mend: "name both in the same settings".into(),
                    });
                }
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_tensor::DType;

    fn model() -> Vec<Site> {
        let mut v = vec![Site::new("model", "model", &[]), Site::new("model.embed_tokens", "embedding", &["e.weight"])];
        for i in 0..3 {
            v.push(Site::new(&format!("model.layers.{i}"), "block", &[]));
            v.push(Site::new(&format!("model.layers.{i}.norm"), "norm", &["n"]));
            v.push(Site::new(&format!("model.layers.{i}.mlp"), "mlp", &[]));
            let w = format!("model.layers.{i}.mlp.up_proj.weight");
            v.push(Site::new(&format!("model.layers.{i}.mlp.up_proj"), "linear", &[&w]));
        }
        for s in &mut v {
            if s.kind == "norm" {
                s.parameters = vec![format!("{}.weight", s.path)];
            }
        }
        v.push(Site::new("lm_head", "head", &["e.weight"]));
        v
    }

    fn plan(json: &str) -> Plan {
        serde_json::from_str(json).unwrap()
    }

    fn refused(json: &str) -> String {
        resolve(&model(), &plan(json)).unwrap_err().iter().map(|c| c.to_string()).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn settings_reach_the_modules_they_name_and_those_below() {
        let r = resolve(
            &model(),
            &plan(
                r#"{"freeze": "model.layers.{0-1}", "recompute": ["model.layers.{1-2}"],
                      "precision": {"model.layers.{*}": "bf16", "**.norm": "f32"}}"#,
            ),
        )
        .unwrap();
        assert!(
            !r.modules["model.layers.0.mlp.up_proj"].trainable && r.modules["model.layers.2.mlp.up_proj"].trainable
        );
        assert!(!r.recompute("model.layers.0") && r.recompute("model.layers.2"));
        assert_eq!(r.modules["model.layers.0.mlp.up_proj"].precision, DType::Bf16);
        assert_eq!(r.modules["model.layers.0.norm"].precision, DType::F32);
        assert_eq!(r.modules["lm_head"].precision, DType::F32);
    }

    #[test]
    fn arithmetic_follows_precision_and_recipes_leave_the_head_alone() {
        let arithmetic = |json: &str| {
            let r = resolve(&model(), &plan(json)).unwrap();
            ["model.layers.0.mlp.up_proj", "lm_head"].map(|path| {
                let s = &r.modules[path];
                (s.arithmetic, s.stochastic_gradients)
            })
        };
        let (f32, bf16) = ((Arithmetic::F32, false), (Arithmetic::Bf16, false));
        assert_eq!(arithmetic(r#"{"precision": "bf16"}"#), [bf16, bf16]);
        assert_eq!(arithmetic(r#"{"precision": "bf16", "arithmetic": "f32"}"#), [f32, f32]);
        assert_eq!(arithmetic(r#"{"arithmetic": "int8_block"}"#), [(Arithmetic::Int8Block, false), bf16]);
        assert_eq!(arithmetic(r#"{"arithmetic": "int8_block_stochastic"}"#), [(Arithmetic::Int8Block, true), bf16]);
        assert_eq!(arithmetic(r#"{"arithmetic": {"**": "int8_block_stochastic", "model": "f32"}}"#), [f32, bf16]);
    }

    #[test]
    fn adapters_freeze_everything_else() {
        let r = resolve(&model(), &plan(r#"{"adapters": "**.up_proj", "train": "lm_head"}"#));
        assert!(r.unwrap_err()[0].to_string().contains("tied"), "the head is the embedding");
        let r = resolve(&model(), &plan(r#"{"adapters": "**.up_proj"}"#)).unwrap();
        assert!(r.modules.values().all(|m| !m.trainable));
        assert!(r.modules["model.layers.1.mlp.up_proj"].adapter);
    }

    #[test]
    fn conflicts_name_both_sides_and_the_mend() {
        assert!(refused(r#"{"recompute": ["model.layers.{*}", "model.layers.1.mlp"]}"#).contains("three times"));
        assert!(refused(r#"{"freeze": "**"}"#).contains("nothing is left to train"));
        assert!(refused(r#"{"freeze": "modle.**"}"#).contains("matches no module"));
        assert!(refused(r#"{"adapters": "**.mlp"}"#).contains("sit beside linear layers"));
        assert!(refused(r#"{"adapters": "**.up_proj", "train": "model.layers.0"}"#).contains("twice"));
        assert!(refused(r#"{"freeze": "lm_head"}"#).contains("tied"));
        assert!(refused(r#"{"recompute": "lm_head"}"#).contains("no single forward"));
        assert!(refused(r#"{"freeze": "a..b"}"#).contains("empty part"));
    }

    #[test]
    fn experts_are_multiplied_alike_and_without_adapters() {
        let mut model = model();
        model.push(Site::new("model.layers.2.mlp.experts", "experts", &[]));
        for e in 0..3 {
            let path = format!("model.layers.2.mlp.experts.{e}");
            model.push(Site::new(&path, "expert", &[]));
            model.push(Site::new(&format!("{path}.up_proj"), "expert_linear", &[&format!("{path}.up_proj.weight")]));
        }
        let refused = |json: &str| resolve(&model, &plan(json)).map(drop).map_err(|c| c[0].to_string());
        let e = refused(r#"{"arithmetic": {"**.experts.{1}": "bf16"}}"#).unwrap_err();
        assert!(e.contains("experts.1.up_proj differs") && e.contains("name all of them"), "{e}");
        refused(r#"{"arithmetic": {"**.experts": "bf16"}}"#).unwrap();
        let e = refused(r#"{"adapters": "**.experts.{*}.up_proj"}"#).unwrap_err();
        assert!(e.contains("not supported yet") && e.contains("self_attn"), "{e}");
        // Frozen one by one they may be.
        refused(r#"{"freeze": "**.experts.{1}"}"#).unwrap();
        let shown = crate::show(&model, &resolve(&model, &plan("{}")).unwrap());
        assert!(shown.contains("mlp.experts.{0-2}") && !shown.contains("experts.1"), "{shown}");
    }

    #[test]
    fn unknown_keys_are_refused() {
        let e = serde_json::from_str::<Plan>(r#"{"recompue": "x"}"#).unwrap_err().to_string();
        assert!(e.contains("recompue") && e.contains("recompute"), "{e}");
    }
}
