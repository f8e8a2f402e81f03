//! `generation_config.json`: what a model's makers recommend, with the user's wishes on top.

use std::path::Path;

use serde_json::Value;

use crate::error::{GenerateError, Result};
use crate::sampling::SamplingParams;

/// What a model folder says about sampling; what it leaves open is `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Sampling parameters.
    pub sampling: SamplingChoice,
    /// Longest answer.
    pub max_new_tokens: Option<usize>,
    /// Tokens that end an answer.
    pub eos_token_ids: Vec<u32>,
}

/// Sampling parameters, each of which may be left open. From a file, or from the command line.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingChoice {
    /// Whether to sample at all; else greedy.
    pub do_sample: Option<bool>,
    /// See [`SamplingParams::temperature`].
    pub temperature: Option<f64>,
    /// See [`SamplingParams::top_k`].
    pub top_k: Option<usize>,
    /// See [`SamplingParams::top_p`].
    pub top_p: Option<f64>,
    /// See [`SamplingParams::min_p`].
    pub min_p: Option<f64>,
    /// See [`SamplingParams::repetition_penalty`].
    pub repetition_penalty: Option<f64>,
}

impl SamplingChoice {
    /// Takes each parameter from `self`, or from `other` where `self` leaves it open.
    ///
    /// Whoever names a temperature, a cut or a top-p wants to sample: then `do_sample` of `other` does not say no.
    #[must_use]
    pub fn or(self, other: SamplingChoice) -> SamplingChoice {
        let shaped = self.temperature.is_some_and(|t| t > 0.0)
            || self.top_k.is_some()
            || self.top_p.is_some()
            || self.min_p.is_some();
        SamplingChoice {
            do_sample: self.do_sample.or(shaped.then_some(true)).or(other.do_sample),
            temperature: self.temperature.or(other.temperature),
            top_k: self.top_k.or(other.top_k),
            top_p: self.top_p.or(other.top_p),
            min_p: self.min_p.or(other.min_p),
            repetition_penalty: self.repetition_penalty.or(other.repetition_penalty),
        }
    }

    /// The parameters, with `transformers`' values for what is still open: greedy unless `do_sample`; then temperature 1,
    /// top-k 50, top-p 1.
    ///
    /// # Errors
    /// If a value is out of range.
    pub fn params(self) -> Result<SamplingParams> {
        let params = SamplingParams {
            temperature: self.temperature.unwrap_or(1.0),
            top_k: self.top_k.unwrap_or(50),
            top_p: self.top_p.unwrap_or(1.0),
            min_p: self.min_p.unwrap_or(0.0),
            repetition_penalty: self.repetition_penalty.unwrap_or(1.0),
        };
        params.check()?;
        Ok(match self.do_sample {
            Some(true) => params,
            _ => SamplingParams { repetition_penalty: params.repetition_penalty, ..SamplingParams::greedy() },
        })
    }
}

impl GenerationDefaults {
    /// Reads `generation_config.json` of a model folder; a folder without one recommends nothing.
    ///
    /// # Errors
    /// If the file is broken; names file and key.
    pub fn from_folder(dir: impl AsRef<Path>) -> Result<GenerationDefaults> {
        let path = dir.as_ref().join("generation_config.json");
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(GenerationDefaults::default()),
            Err(source) => return Err(GenerateError::Io { path, source }),
        };
        let place = path.display().to_string();
        let value = serde_json::from_str(&text).map_err(|e| GenerateError::Defaults {
            place: place.clone(),
            key: "(whole file)".into(),
            why: format!("is not JSON: {e}"),
        })?;
        GenerationDefaults::from_json(&place, &value)
    }

    /// Reads the keys of a JSON object; `place` names it in errors. Keys that do not concern sampling are passed over.
    ///
    /// # Errors
    /// As [`GenerationDefaults::from_folder`].
    pub fn from_json(place: &str, value: &Value) -> Result<GenerationDefaults> {
        let r = Reader { place, value };
        Ok(GenerationDefaults {
            sampling: SamplingChoice {
                do_sample: r.get("do_sample", "true or false", Value::as_bool)?,
                temperature: r.get("temperature", "a number", Value::as_f64)?,
                top_k: r.get("top_k", "a whole number from 0 up", as_size)?,
                top_p: r.get("top_p", "a number", Value::as_f64)?,
                min_p: r.get("min_p", "a number", Value::as_f64)?,
                repetition_penalty: r.get("repetition_penalty", "a number", Value::as_f64)?,
            },
            max_new_tokens: r.get("max_new_tokens", "a whole number from 0 up", as_size)?,
            eos_token_ids: r.get("eos_token_id", "a token id or a list of them", as_ids)?.unwrap_or_default(),
        })
    }
}

struct Reader<'a> {
    place: &'a str,
    value: &'a Value,
}

impl Reader<'_> {
    fn get<T>(&self, key: &str, what: &str, read: impl Fn(&Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.value.get(key).filter(|v| !v.is_null()) else { return Ok(None) };
        match read(value) {
            Some(v) => Ok(Some(v)),
            None => Err(GenerateError::Defaults {
                place: self.place.into(),
                key: key.into(),
                why: format!("must be {what}, found {value}"),
            }),
        }
    }
}

fn as_size(v: &Value) -> Option<usize> {
    v.as_u64().map(|n| n as usize)
}

fn as_ids(v: &Value) -> Option<Vec<u32>> {
    let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
    match v {
        Value::Array(list) => list.iter().map(id).collect(),
        one => id(one).map(|id| vec![id]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(v: Value) -> Result<GenerationDefaults> {
        GenerationDefaults::from_json("generation_config.json", &v)
    }

    #[test]
    fn a_real_file_gives_its_parameters() {
        // The values of Qwen2.5-0.5B-Instruct.
        let d = read(json!({"bos_token_id": 151643, "pad_token_id": 151643, "do_sample": true,
            "eos_token_id": [151645, 151643], "repetition_penalty": 1.1, "temperature": 0.7, "top_p": 0.8,
            "top_k": 20, "transformers_version": "4.37.0"}))
        .unwrap();
        assert_eq!(d.eos_token_ids, [151_645, 151_643]);
        let p = d.sampling.params().unwrap();
        assert_eq!(p, SamplingParams { temperature: 0.7, top_k: 20, top_p: 0.8, min_p: 0.0, repetition_penalty: 1.1 });
    }

    #[test]
    fn greedy_unless_the_file_or_the_user_asks_for_more() {
        let d = read(json!({"eos_token_id": 2, "repetition_penalty": 1.2, "temperature": 0.6})).unwrap();
        let p = d.sampling.params().unwrap();
        assert_eq!((p.temperature, p.repetition_penalty), (0.0, 1.2));
        let user = SamplingChoice { top_p: Some(0.9), ..SamplingChoice::default() };
        let p = user.or(d.sampling).params().unwrap();
        assert_eq!((p.temperature, p.top_p, p.top_k), (0.6, 0.9, 50));
        let user = SamplingChoice { temperature: Some(0.0), ..SamplingChoice::default() };
        assert_eq!(user.or(p_choice()).params().unwrap().temperature, 0.0);
    }

    fn p_choice() -> SamplingChoice {
        SamplingChoice { do_sample: Some(true), temperature: Some(0.6), ..SamplingChoice::default() }
    }

    #[test]
    fn errors_name_file_and_key() {
        for (value, key) in [
            (json!({"temperature": "hot"}), "temperature"),
            (json!({"eos_token_id": [1, "two"]}), "eos_token_id"),
            (json!({"top_k": -1}), "top_k"),
        ] {
            let e = read(value).unwrap_err().to_string();
            assert!(e.starts_with("generation_config.json: ") && e.contains(key), "{e}");
        }
        let e = SamplingChoice { top_p: Some(7.0), ..p_choice() }.params().unwrap_err().to_string();
        assert!(e.starts_with("top_p: 7 "), "{e}");
    }
}
