//! What a module is, and walks over a tree of them.

use phalanx_tensor::Tensor;

use crate::{Cx, Parameter, Result};

/// A piece of a model that maps rows to rows.
pub trait Module: Send + Sync + 'static {
    /// x [T, …] → [T, …]
    ///
    /// # Errors
    /// If a shape does not fit, a parameter has no value, or memory runs out.
    fn forward(&self, cx: &mut Cx, x: Tensor) -> Result<Tensor>;

    /// Shows the visitor its own parameters and its children, in the order of the forward.
    fn visit(&self, v: &mut Visitor<'_>);

    /// What kind of module it is, for plans and `plan show`: `linear`, `norm`, `embedding`, `attention`, `mlp`, `block`, `model`.
    fn kind(&self) -> &'static str;
}

/// Walks a module tree with the path of each module.
pub struct Visitor<'a> {
    path: String,
    on_module: &'a mut dyn FnMut(&str, &'static str),
    on_parameter: &'a mut dyn FnMut(&str, &Parameter),
}

impl Visitor<'_> {
    /// A child of the module being visited.
    pub fn child(&mut self, name: &str, module: &dyn Module) {
        let before = self.path.len();
        if !self.path.is_empty() {
            self.path.push('.');
        }
        self.path.push_str(name);
        (self.on_module)(&self.path, module.kind());
        module.visit(self);
        self.path.truncate(before);
    }

    /// A parameter of the module being visited.
    pub fn parameter(&mut self, p: &Parameter) {
        (self.on_parameter)(&self.path, p);
    }
}

/// Every module below `root` as (path, kind), outermost first.
pub fn describe(root: &dyn Module) -> Vec<(String, &'static str)> {
    let mut out = Vec::new();
    walk(root, &mut |path, kind| out.push((path.to_owned(), kind)), &mut |_, _| {});
    out
}

/// Every parameter below `root`, each once (a tied one at its first use), in the order of the forward.
pub fn parameters(root: &dyn Module) -> Vec<Parameter> {
    let mut out: Vec<Parameter> = Vec::new();
    walk(root, &mut |_, _| {}, &mut |_, p| {
        if !out.iter().any(|q| q.is(p)) {
            out.push(p.clone());
        }
    });
    out
}

fn walk(
    root: &dyn Module,
    on_module: &mut dyn FnMut(&str, &'static str),
    on_parameter: &mut dyn FnMut(&str, &Parameter),
) {
    root.visit(&mut Visitor { path: String::new(), on_module, on_parameter });
}
