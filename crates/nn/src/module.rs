//! What a module is, and walks over a tree of them.

use phalanx_tensor::Tensor;

use crate::{Cx, Parameter, Result};

/// A piece of a model that can be listed: what plans, weight files and optimizers see of it.
pub trait Describe: Send + Sync + 'static {
    /// Shows the visitor its own parameters and its children, in the order of the forward.
    fn visit(&self, v: &mut Visitor<'_>);

    /// What kind of module it is, for plans and `plan show`: `linear`, `norm`, `embedding`, `attention`, `mlp`, `block`, `model`; of a mixture of
    /// experts also `router`, `experts`, `expert`, `expert_linear`.
    fn kind(&self) -> &'static str;

    /// Size of a head, where its projections are made of heads that cannot be cut apart.
    fn head_dim(&self) -> Option<usize> {
        None
    }
}

/// A piece of a model that maps rows to rows.
pub trait Module: Describe {
    /// x [T, …] → [T, …]
    ///
    /// # Errors
    /// If a shape does not fit, a parameter has no value, or memory runs out.
    fn forward(&self, cx: &mut Cx, x: Tensor) -> Result<Tensor>;
}

/// What a walk comes by: a module at a path, or a parameter of the module at a path.
pub enum Walk<'a> {
    /// A module, before what is below it.
    Module(&'a str, &'a dyn Describe),
    /// A parameter of the module at the path.
    Parameter(&'a str, &'a Parameter),
}

/// Walks a module tree with the path of each module.
pub struct Visitor<'a> {
    path: String,
    on: &'a mut dyn FnMut(Walk<'_>),
}

impl Visitor<'_> {
    /// A child of the module being visited.
    pub fn child(&mut self, name: &str, module: &dyn Describe) {
        let before = self.path.len();
        if !self.path.is_empty() {
            self.path.push('.');
        }
        self.path.push_str(name);
        (self.on)(Walk::Module(&self.path, module));
        module.visit(self);
        self.path.truncate(before);
    }

    /// A parameter of the module being visited.
    pub fn parameter(&mut self, p: &Parameter) {
        (self.on)(Walk::Parameter(&self.path, p));
    }
}

/// Walks everything below `root`, outermost first, in the order of the forward. A tied parameter is met at each of its places.
pub fn walk(root: &dyn Describe, on: &mut dyn FnMut(Walk<'_>)) {
    root.visit(&mut Visitor { path: String::new(), on });
}

/// Every parameter below `root`, each once (a tied one at its first place), in the order of the forward.
pub fn parameters(root: &dyn Describe) -> Vec<Parameter> {
    let (mut out, mut met) = (Vec::new(), std::collections::HashSet::new());
    walk(root, &mut |event| {
        if let Walk::Parameter(_, p) = event
            && met.insert(p.id())
        {
            out.push(p.clone());
        }
    });
    out
}
