//! [`Entry`]: what is known at one logged step. Every writer of this crate takes it.

use serde_json::{Map, Value, json};

/// The numbers of one logged step, by the names that transformers uses: `loss`, `grad_norm`, `learning_rate`,
/// `eval_loss`, and ours beside them (`tokens_per_second`).
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Optimizer steps done.
    pub step: u64,
    /// Passes over the data done, as a fraction.
    pub epoch: f64,
    /// Name and value, in the order they were added.
    pub values: Vec<(String, Value)>,
}

impl Entry {
    /// An entry without values.
    pub fn new(step: u64, epoch: f64) -> Self {
        Entry { step, epoch, values: vec![] }
    }

    /// Adds a value. A number that is not finite becomes null: JSON has none.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.values.push((name.into(), value.into()));
        self
    }

    /// The number called `name`; NaN for null, `None` where there is none.
    pub fn number(&self, name: &str) -> Option<f64> {
        let (_, value) = self.values.iter().find(|(n, _)| n == name)?;
        if value.is_null() { Some(f64::NAN) } else { value.as_f64() }
    }

    /// One flat object: the values, then `epoch` and `step`, as in `trainer_state.json`.
    pub fn to_json(&self) -> Value {
        let mut object: Map<_, _> = self.values.iter().cloned().collect();
        object.insert("epoch".into(), json!(self.epoch));
        object.insert("step".into(), json!(self.step));
        Value::Object(object)
    }

    /// Reads [`Entry::to_json`] back; `None` where it is no such object.
    pub fn from_json(value: &Value) -> Option<Self> {
        let object = value.as_object()?;
        let step = object.get("step")?.as_u64()?;
        let epoch = object.get("epoch").and_then(Value::as_f64).unwrap_or(0.0);
        let rest = object.iter().filter(|(name, _)| *name != "step" && *name != "epoch");
        Some(Entry { step, epoch, values: rest.map(|(n, v)| (n.clone(), v.clone())).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        let entry = Entry::new(7, 0.25).with("loss", 2.5).with("grad_norm", f64::NAN).with("skipped", 1u64);
        let json = entry.to_json();
        assert_eq!(json.to_string(), r#"{"loss":2.5,"grad_norm":null,"skipped":1,"epoch":0.25,"step":7}"#);
        assert_eq!(Entry::from_json(&json), Some(entry.clone()));
        assert!(entry.number("grad_norm").is_some_and(f64::is_nan));
        assert_eq!((entry.number("skipped"), entry.number("lr")), (Some(1.0), None));
        assert_eq!(Entry::from_json(&json!({"loss": 1})), None);
    }
}
