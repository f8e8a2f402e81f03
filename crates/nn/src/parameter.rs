//! Parameters: named handles to values that may change place and type.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

use phalanx_autograd::functions::{Param, ParamSource};
use phalanx_autograd::{AutogradError, GradSlot};
use phalanx_tensor::{PreparedMatrix, Tensor};

use crate::{NnError, Placement, Result};

/// A model parameter. Clones are the same parameter (tied embeddings are one parameter used twice).
///
/// On one rank a parameter has a value and a gradient. On several, its [`Placement`] says which part layers see (*working*) and which
/// rows of that the rank *keeps*, with gradient and optimizer state. Where the two differ, the working value is there only while it is
/// gathered, and the working gradient waits to be reduced into the kept one.
#[derive(Clone)]
pub struct Parameter(Arc<Inner>);

struct Inner {
    name: String,
    shape: Vec<usize>,
    placement: RwLock<Placement>,
    kept: RwLock<Option<Held>>,
    gathered: RwLock<Option<Tensor>>,
    grad: GradSlot,
    kept_grad: GradSlot,
    trainable: AtomicBool,
    /// Whether it is a buffer.
    buffer: bool,
}

/// What a parameter holds.
enum Held {
    Tensor(Tensor),
    /// A matrix laid out for inference.
    Prepared(PreparedMatrix),
}

fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(|e| e.into_inner())
}

fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(|e| e.into_inner())
}

impl Parameter {
    /// A parameter of a name (as in the weights file) and shape, without a value yet, trainable, whole.
    pub fn new(name: impl Into<String>, shape: &[usize]) -> Parameter {
        Parameter::build(name.into(), shape, false)
    }

    /// A buffer: it lies in the file like a parameter, in f32 whatever a plan says, but no gradient trains it and it begins as zeros.
    pub fn buffer(name: impl Into<String>, shape: &[usize]) -> Parameter {
        Parameter::build(name.into(), shape, true)
    }

    fn build(name: String, shape: &[usize], buffer: bool) -> Parameter {
        Parameter(Arc::new(Inner {
            name,
            shape: shape.to_vec(),
            placement: RwLock::new(Placement::whole(shape)),
            kept: RwLock::new(None),
            gathered: RwLock::new(None),
            grad: GradSlot::new(),
            kept_grad: GradSlot::new(),
            trainable: AtomicBool::new(!buffer),
            buffer,
        }))
    }

    /// Full name, as in the weights file.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Shape of the whole parameter, over all ranks.
    pub fn shape(&self) -> &[usize] {
        &self.0.shape
    }

    /// Number of elements of the whole parameter.
    pub fn len(&self) -> usize {
        self.0.shape.iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether it is trained.
    pub fn trainable(&self) -> bool {
        self.0.trainable.load(Ordering::Relaxed)
    }

    /// Whether it is a buffer.
    pub fn is_buffer(&self) -> bool {
        self.0.buffer
    }

    /// Trains or freezes it. A buffer stays as it is.
    pub fn set_trainable(&self, yes: bool) {
        self.0.trainable.store(yes && !self.0.buffer, Ordering::Relaxed);
    }

    /// What tells it from every other parameter that is alive.
    pub(crate) fn id(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }

    /// Whether two handles are one parameter.
    pub fn is(&self, other: &Parameter) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Which part of it is here.
    pub fn placement(&self) -> Placement {
        read(&self.0.placement).clone()
    }

    /// Says which part of it is here, before it gets a value.
    ///
    /// # Errors
    /// If it has a value, or the part is no part of it.
    pub fn place(&self, placement: Placement) -> Result<()> {
        let inside = placement.working.len() == self.0.shape.len()
            && placement.working.iter().zip(&self.0.shape).all(|(r, n)| r.start <= r.end && r.end <= *n)
            && placement.kept.end <= placement.working.first().map_or(1, Range::len);
        if !inside || read(&self.0.kept).is_some() {
            let (name, placement) = (self.0.name.clone(), format!("{placement:?}"));
            return Err(NnError::Placement { name, shape: self.0.shape.clone(), placement });
        }
        *write(&self.0.placement) = placement;
        Ok(())
    }

    /// The value that layers work with.
    ///
    /// # Errors
    /// If it has none, is not gathered, or is laid out for inference.
    pub fn value(&self) -> Result<Tensor> {
        if let Some(t) = &*read(&self.0.gathered) {
            return Ok(t.clone());
        }
        if read(&self.0.placement).sharded {
            return Err(NnError::NotGathered(self.0.name.clone()));
        }
        self.kept()
    }

    /// The value that this rank keeps.
    ///
    /// # Errors
    /// If it has none, or is laid out for inference.
    pub fn kept(&self) -> Result<Tensor> {
        match &*read(&self.0.kept) {
            Some(Held::Tensor(t)) => Ok(t.clone()),
            Some(Held::Prepared(m)) => Err(self.prepared_error(m)),
            None => Err(NnError::NoValue(self.0.name.clone())),
        }
    }

    /// Gives the working value, gathered from the ranks that keep its rows.
    ///
    /// # Errors
    /// If the shape is not that of the working part.
    pub fn gather(&self, value: Tensor) -> Result<()> {
        let want = read(&self.0.placement).working_shape();
        if value.shape() != want {
            let (name, got) = (self.0.name.clone(), value.shape().to_vec());
            return Err(NnError::Shape { name, want, got });
        }
        *write(&self.0.gathered) = Some(value);
        Ok(())
    }

    /// Whether a gathered value is here.
    pub fn is_gathered(&self) -> bool {
        read(&self.0.gathered).is_some()
    }

    /// Gives the gathered value back; without one nothing happens.
    pub fn release(&self) -> Option<Tensor> {
        write(&self.0.gathered).take()
    }

    fn prepared_error(&self, m: &PreparedMatrix) -> NnError {
        NnError::Prepared { name: self.0.name.clone(), form: m.form().to_string() }
    }

    /// The matrix laid out for inference, if it is.
    pub fn prepared(&self) -> Option<PreparedMatrix> {
        match &*read(&self.0.kept) {
            Some(Held::Prepared(m)) => Some(m.clone()),
            _ => None,
        }
    }

    /// Bytes of the kept value; 0 without one.
    pub fn bytes(&self) -> usize {
        match &*read(&self.0.kept) {
            Some(Held::Tensor(t)) => t.bytes(),
            Some(Held::Prepared(m)) => m.bytes(),
            None => 0,
        }
    }

    /// Gives it a value: the part that is kept here.
    ///
    /// # Errors
    /// If the shape is not that of the part.
    pub fn set(&self, value: Tensor) -> Result<()> {
        let shape = value.shape().to_vec();
        self.hold(&shape, Held::Tensor(value))
    }

    /// Gives it a matrix laid out for inference. From then on it can be multiplied with and read row by row by layers, nothing else.
    ///
    /// # Errors
    /// If the shape is not the declared one.
    pub fn set_prepared(&self, value: PreparedMatrix) -> Result<()> {
        self.hold(&value.shape(), Held::Prepared(value))
    }

    fn hold(&self, shape: &[usize], value: Held) -> Result<()> {
        let want = read(&self.0.placement).kept_shape();
        if shape != want {
            return Err(NnError::Shape { name: self.0.name.clone(), want, got: shape.to_vec() });
        }
        *write(&self.0.kept) = Some(value);
        Ok(())
    }

    /// Changes the kept value in place: `f` gets the only handle.
    ///
    /// # Errors
    /// If it has no value or is laid out for inference, or those of `f`.
    pub fn update<R, E: From<NnError>>(&self, f: impl FnOnce(&mut Tensor) -> Result<R, E>) -> Result<R, E> {
        let mut v = write(&self.0.kept);
        match v.as_mut() {
            Some(Held::Tensor(t)) => f(t),
            Some(Held::Prepared(m)) => Err(self.prepared_error(m).into()),
            None => Err(NnError::NoValue(self.0.name.clone()).into()),
        }
    }

    /// Where the gradient of the working value accumulates.
    pub fn grad(&self) -> &GradSlot {
        &self.0.grad
    }

    /// Where the gradient of the kept part is found: the slot of the working one, unless they are different parts.
    pub fn kept_grad(&self) -> &GradSlot {
        if read(&self.0.placement).sharded { &self.0.kept_grad } else { &self.0.grad }
    }

    /// The parameter as a function takes it: where its value is found, and the gradient's place if it is trained.
    ///
    /// # Errors
    /// If it has no value now.
    pub fn param(&self) -> Result<Param> {
        self.value()?;
        Ok(Param::new(self.clone(), self.trainable().then(|| self.0.grad.clone())))
    }
}

impl ParamSource for Parameter {
    fn value(&self) -> phalanx_autograd::Result<Tensor> {
        Parameter::value(self).map_err(|e| AutogradError::Other(e.to_string()))
    }
}

impl std::fmt::Debug for Parameter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{:?}", self.0.name, self.0.shape)
    }
}
