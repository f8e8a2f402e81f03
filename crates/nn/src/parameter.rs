//! Parameters: named handles to values that may change place and type.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock};

use phalanx_autograd::GradSlot;
use phalanx_autograd::functions::Param;
use phalanx_tensor::{PreparedMatrix, Tensor};

use crate::{NnError, Result};

/// A model parameter. Clones are the same parameter (tied embeddings are one parameter used twice).
#[derive(Clone)]
pub struct Parameter(Arc<Inner>);

struct Inner {
    name: String,
    shape: Vec<usize>,
    value: RwLock<Option<Held>>,
    grad: GradSlot,
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

impl Parameter {
    /// A parameter of a name (as in the weights file) and shape, without a value yet, trainable.
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
            value: RwLock::new(None),
            grad: GradSlot::new(),
            trainable: AtomicBool::new(!buffer),
            buffer,
        }))
    }

    /// Full name, as in the weights file.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Declared shape.
    pub fn shape(&self) -> &[usize] {
        &self.0.shape
    }

    /// Number of elements.
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

    /// The value.
    ///
    /// # Errors
    /// If it has none, or is laid out for inference.
    pub fn value(&self) -> Result<Tensor> {
        match &*self.0.value.read().unwrap_or_else(|e| e.into_inner()) {
            Some(Held::Tensor(t)) => Ok(t.clone()),
            Some(Held::Prepared(m)) => Err(self.prepared_error(m)),
            None => Err(NnError::NoValue(self.0.name.clone())),
        }
    }

    fn prepared_error(&self, m: &PreparedMatrix) -> NnError {
        NnError::Prepared { name: self.0.name.clone(), form: m.form().to_string() }
    }

    /// The matrix laid out for inference, if it is.
    pub fn prepared(&self) -> Option<PreparedMatrix> {
        match &*self.0.value.read().unwrap_or_else(|e| e.into_inner()) {
            Some(Held::Prepared(m)) => Some(m.clone()),
            _ => None,
        }
    }

    /// Bytes of the value; 0 without one.
    pub fn bytes(&self) -> usize {
        match &*self.0.value.read().unwrap_or_else(|e| e.into_inner()) {
            Some(Held::Tensor(t)) => t.bytes(),
            Some(Held::Prepared(m)) => m.bytes(),
            None => 0,
        }
    }

    /// Gives it a value.
    ///
    /// # Errors
    /// If the shape is not the declared one.
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
        if shape != self.shape() {
            return Err(NnError::Shape { name: self.0.name.clone(), want: self.0.shape.clone(), got: shape.to_vec() });
        }
        *self.0.value.write().unwrap_or_else(|e| e.into_inner()) = Some(value);
        Ok(())
    }

    /// Changes the value in place: `f` gets the only handle.
    ///
    /// # Errors
    /// If it has no value or is laid out for inference, or those of `f`.
    pub fn update<R, E: From<NnError>>(&self, f: impl FnOnce(&mut Tensor) -> Result<R, E>) -> Result<R, E> {
        let mut v = self.0.value.write().unwrap_or_else(|e| e.into_inner());
        match v.as_mut() {
            Some(Held::Tensor(t)) => f(t),
            Some(Held::Prepared(m)) => Err(self.prepared_error(m).into()),
            None => Err(NnError::NoValue(self.0.name.clone()).into()),
        }
    }

    /// Where its gradient accumulates.
    pub fn grad(&self) -> &GradSlot {
        &self.0.grad
    }

    /// The parameter as a function takes it: value, and the gradient's place if it is trained.
    ///
    /// # Errors
    /// If it has no value.
    pub fn param(&self) -> Result<Param> {
        Ok(Param { value: self.value()?, grad: self.trainable().then(|| self.0.grad.clone()) })
    }
}

impl std::fmt::Debug for Parameter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{:?}", self.0.name, self.0.shape)
    }
}
