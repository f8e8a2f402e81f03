//! The tape: what was computed, in order, and the walk back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use phalanx_kernels::elementwise;
use phalanx_tensor::{Category, DType, NodeId, Runtime, Tensor};

use crate::{AutogradError, Recipe, Result, Saved};

/// The backward half of an operation.
pub trait Function: Send {
    /// Its name in messages and profiles.
    fn name(&self) -> &'static str;

    /// The gradients of the inputs, in the order they were recorded, given that of the output; `None` for an input that needs none.
    /// Gradients of parameters are added to their [`crate::GradSlot`]s. Runs once.
    ///
    /// # Errors
    /// Those of the kernels, or if memory runs out.
    fn backward(self: Box<Self>, rt: &Runtime, grad: Tensor) -> Result<Vec<Option<Tensor>>>;

    /// As [`Function::backward`], but what only gradients of parameters need may be left for later. By default nothing is.
    ///
    /// # Errors
    /// As [`Function::backward`].
    fn backward_inputs(self: Box<Self>, rt: &Runtime, grad: Tensor) -> Result<(Vec<Option<Tensor>>, Option<Deferred>)> {
        Ok((self.backward(rt, grad)?, None))
    }
}

/// Something to be done later in a backward pass: what [`Tape::mark`] leaves, or the half of a function's backward that makes gradients of
/// parameters.
pub type Deferred = Box<dyn FnOnce(&Runtime) -> Result<()> + Send>;

/// What is left at a place of the tape.
enum Mark {
    /// Done when backward comes by.
    Now(Deferred),
    /// Done when the gradients of the parameters above it are complete.
    AfterWeights(Deferred),
}

/// The second half of a backward pass that was split: the gradients of parameters (the W of zero-bubble schedules).
#[must_use = "gradients of parameters are made by run()"]
#[derive(Default)]
pub struct WeightGradients(Vec<Deferred>);

impl WeightGradients {
    /// Makes them.
    ///
    /// # Errors
    /// Those of the functions.
    pub fn run(self, rt: &Runtime) -> Result<()> {
        self.0.into_iter().try_for_each(|f| f(rt))
    }
}

struct Node {
    function: Option<Box<dyn Function>>,
    mark: Option<Mark>,
    inputs: Vec<Option<usize>>,
    shape: Vec<usize>,
    recipe: Option<Arc<Recipe>>,
    /// Inputs of the tape keep their gradient for the caller.
    is_input: bool,
    /// The module that it was recorded in, where that is profiled.
    scope: Option<Arc<str>>,
}

/// A record of operations for one backward pass.
pub struct Tape {
    id: u64,
    nodes: Vec<Node>,
    scope: Option<Arc<str>>,
}

impl Default for Tape {
    fn default() -> Self {
        Tape::new()
    }
}

/// Gradients of the inputs of a tape.
pub struct Gradients {
    tape: u64,
    by_node: Vec<Option<Tensor>>,
}

impl Gradients {
    /// The gradient of an input, if any reached it.
    pub fn of(&self, input: &Tensor) -> Option<&Tensor> {
        let n = input.node().filter(|n| n.tape == self.tape)?;
        self.by_node.get(n.index)?.as_ref()
    }

    /// Takes the gradient of an input out.
    pub fn take(&mut self, input: &Tensor) -> Option<Tensor> {
        let n = input.node().filter(|n| n.tape == self.tape)?;
        self.by_node.get_mut(n.index)?.take()
    }
}

/// Tells tapes apart, so that a value of one is not taken for a value of another. An identity, not state.
static NEXT_TAPE: AtomicU64 = AtomicU64::new(0);

impl Tape {
    /// An empty tape.
    pub fn new() -> Tape {
        Tape { id: NEXT_TAPE.fetch_add(1, Ordering::Relaxed), nodes: Vec::new(), scope: None }
    }

    /// Names the module that is recorded from now on, so that a profile of backward can; gives the one before.
    pub fn set_scope(&mut self, scope: Option<Arc<str>>) -> Option<Arc<str>> {
        std::mem::replace(&mut self.scope, scope)
    }

    /// Number of recorded operations and inputs.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether nothing is recorded.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Makes `t` an input: its gradient can be asked for after [`Tape::backward`].
    pub fn input(&mut self, t: Tensor) -> Tensor {
        let shape = t.shape().to_vec();
        let node =
            Node { function: None, mark: None, inputs: vec![], shape, recipe: None, is_input: true, scope: None };
        self.push(node, t)
    }

    /// Leaves something to be done when backward comes by: after all that is recorded later, before all that was recorded earlier, and
    /// whether or not gradients flow there. So every rank does it in the same place.
    pub fn mark(&mut self, f: impl FnOnce(&Runtime) -> Result<()> + Send + 'static) {
        self.push_mark(Mark::Now(Box::new(f)));
    }

    /// As [`Tape::mark`], but in a [split](Tape::backward_inputs) backward pass with the second half: what is recorded later has its
    /// gradients of parameters then.
    pub fn mark_after_weights(&mut self, f: impl FnOnce(&Runtime) -> Result<()> + Send + 'static) {
        self.push_mark(Mark::AfterWeights(Box::new(f)));
    }

    fn push_mark(&mut self, mark: Mark) {
        let (inputs, shape, mark) = (vec![], vec![], Some(mark));
        self.nodes.push(Node { function: None, mark, inputs, shape, recipe: None, is_input: false, scope: None });
    }

    fn push(&mut self, node: Node, t: Tensor) -> Tensor {
        let id = NodeId { tape: self.id, index: self.nodes.len() };
        self.nodes.push(node);
        t.with_node(Some(id))
    }

    fn index(&self, t: &Tensor) -> Option<usize> {
        t.node().filter(|n| n.tape == self.id).map(|n| n.index)
    }

    /// Whether the gradient of `t` is wanted.
    pub fn tracks(&self, t: &Tensor) -> bool {
        self.index(t).is_some()
    }

    /// Records `output` as computed from `inputs` if any of them is tracked or `has_params` (a trainable parameter takes part);
    /// else returns it unrecorded and drops `function`, with all that it saved.
    pub fn record(
        &mut self,
        inputs: &[&Tensor],
        has_params: bool,
        output: Tensor,
        function: impl Function + 'static,
        recipe: Option<Arc<Recipe>>,
    ) -> Tensor {
        let inputs: Vec<_> = inputs.iter().map(|t| self.index(t)).collect();
        if !has_params && inputs.iter().all(Option::is_none) {
            return output.with_node(None);
        }
        let shape = output.shape().to_vec();
        let (function, scope) = (Some(Box::new(function) as Box<dyn Function>), self.scope.clone());
        self.push(Node { function, mark: None, inputs, shape, recipe, is_input: false, scope }, output)
    }

    /// Saves `t` for backward: as its recipe if its producer left one, else the tensor itself.
    pub fn save(&self, t: &Tensor) -> Saved {
        match self.index(t).and_then(|i| self.nodes[i].recipe.as_ref()) {
            Some(r) => Saved::rebuild(r),
            None => Saved::keep(t),
        }
    }

    /// Walks back from `root`, whose gradient is `seed`. Consumes the tape; what each function saved is freed as soon as it has run.
    ///
    /// # Errors
    /// If `root` was not recorded here, or a function fails.
    pub fn backward(self, rt: &Runtime, root: &Tensor, seed: Tensor) -> Result<Gradients> {
        self.walk_back(rt, root, seed, None)
    }

    /// The first half of [`Tape::backward`]: gradients of the inputs, and what is left to be done for those of parameters. Both halves
    /// together give the bits of the whole.
    ///
    /// # Errors
    /// As [`Tape::backward`].
    pub fn backward_inputs(self, rt: &Runtime, root: &Tensor, seed: Tensor) -> Result<(Gradients, WeightGradients)> {
        let mut later = vec![];
        let gradients = self.walk_back(rt, root, seed, Some(&mut later))?;
        Ok((gradients, WeightGradients(later)))
    }

    fn walk_back(
        mut self,
        rt: &Runtime,
        root: &Tensor,
        seed: Tensor,
        mut later: Option<&mut Vec<Deferred>>,
    ) -> Result<Gradients> {
        let root = self.index(root).ok_or(AutogradError::NotRecorded)?;
        let mut grads: Vec<Option<Tensor>> = self.nodes.iter().map(|_| None).collect();
        grads[root] = Some(seed);
        while let Some(mut node) = self.nodes.pop() {
            let i = self.nodes.len();
            match (node.mark.take(), &mut later) {
                (None, _) => {}
                (Some(Mark::AfterWeights(f)), Some(later)) => {
                    later.push(f);
                    continue;
                }
                (Some(Mark::Now(f) | Mark::AfterWeights(f)), _) => {
                    f(rt)?;
                    continue;
                }
            }
            let Some(function) = node.function.take() else { continue };
            let Some(grad) = grads[i].take() else { continue };
            let grad = grad.into_shape(&node.shape)?;
            let _span = rt.device().profiler().scope(|| match &node.scope {
                Some(module) => format!("{module}: {} backward", function.name()),
                None => format!("{} backward", function.name()),
            });
            let inputs = match &mut later {
                None => function.backward(rt, grad)?,
                Some(later) => {
                    let (inputs, rest) = function.backward_inputs(rt, grad)?;
                    later.extend(rest);
                    inputs
                }
            };
            for (to, g) in node.inputs.iter().zip(inputs) {
                if let (Some(to), Some(g)) = (*to, g) {
                    grads[to] = Some(match grads[to].take() {
                        None => g,
                        Some(sum) => add_into(rt, sum, g)?,
                    });
                }
            }
            debug_assert!(!node.is_input);
        }
        Ok(Gradients { tape: self.id, by_node: grads })
    }
}

/// sum + g, in the memory of whichever is free to change.
fn add_into(rt: &Runtime, mut sum: Tensor, mut g: Tensor) -> Result<Tensor> {
    if sum.is_unique() {
        elementwise::add_assign(rt.device(), sum.f32_mut()?, g.f32()?, 1.0)?;
        return Ok(sum);
    }
    if g.is_unique() {
        elementwise::add_assign(rt.device(), g.f32_mut()?, sum.f32()?, 1.0)?;
        return Ok(g);
    }
    let mut out = rt.empty(sum.shape(), DType::F32, Category::Activations)?;
    elementwise::add(rt.device(), sum.f32()?, g.f32()?, out.f32_mut()?)?;
    Ok(out)
}
