//! What a plan says, before it is resolved against a model.

use phalanx_nn::{Arithmetic, Recipe};
use phalanx_tensor::DType;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::ParallelPlan;

/// Precision of a module's parameters while computing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Precision {
    /// float32.
    #[serde(rename = "f32", alias = "float32", alias = "fp32")]
    F32,
    /// bfloat16 storage; trained parameters keep f32 masters in the optimizer.
    #[serde(rename = "bf16", alias = "bfloat16")]
    Bf16,
}

/// How exact the products of linear layers must be, by the names of a plan; see [`Arithmetic`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exactness {
    /// As f32.
    #[serde(rename = "f32", alias = "float32", alias = "fp32")]
    F32,
    /// 16 bits of each operand count.
    #[serde(rename = "bf16x2")]
    Bf16x2,
    /// Operands are rounded to bf16.
    #[serde(rename = "bf16", alias = "bfloat16")]
    Bf16,
    /// 8 bits and block scales, multiplied as integers.
    #[serde(rename = "int8_block")]
    Int8Block,
    /// The same, with gradients rounded at random.
    #[serde(rename = "int8_block_stochastic")]
    Int8BlockStochastic,
    /// FP8 with one scale a tensor that follows from its magnitudes in earlier steps, simulated: operands are rounded, products are f32.
    #[serde(rename = "fp8_delayed")]
    Fp8Delayed,
    /// FP8 with one scale a tensor, from its own magnitude, simulated.
    #[serde(rename = "fp8_tensorwise")]
    Fp8Tensorwise,
    /// FP8 with block scales, simulated.
    #[serde(rename = "fp8_blockwise")]
    Fp8Blockwise,
    /// FP8 with a power of two for each 32 values, simulated.
    #[serde(rename = "mxfp8")]
    Mxfp8,
    /// fp16 with block scales, simulated.
    #[serde(rename = "fp16_block")]
    Fp16Block,
}

impl Exactness {
    /// All, the most exact first.
    pub const ALL: [Exactness; 10] = [
        Exactness::F32,
        Exactness::Bf16x2,
        Exactness::Bf16,
        Exactness::Int8Block,
        Exactness::Int8BlockStochastic,
        Exactness::Fp8Delayed,
        Exactness::Fp8Tensorwise,
        Exactness::Fp8Blockwise,
        Exactness::Mxfp8,
        Exactness::Fp16Block,
    ];

    /// The name in a plan.
    pub const fn name(self) -> &'static str {
        match self {
            Exactness::F32 => "f32",
            Exactness::Bf16x2 => "bf16x2",
            Exactness::Bf16 => "bf16",
            Exactness::Int8Block => "int8_block",
            Exactness::Int8BlockStochastic => "int8_block_stochastic",
            Exactness::Fp8Delayed => "fp8_delayed",
            Exactness::Fp8Tensorwise => "fp8_tensorwise",
            Exactness::Fp8Blockwise => "fp8_blockwise",
            Exactness::Mxfp8 => "mxfp8",
            Exactness::Fp16Block => "fp16_block",
        }
    }
}

impl std::fmt::Display for Exactness {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Exactness {
    type Err = String;
    fn from_str(s: &str) -> Result<Exactness, String> {
        let names = Exactness::ALL.map(Exactness::name).join(", ");
        Exactness::ALL.into_iter().find(|e| e.name() == s).ok_or_else(|| format!("\"{s}\" is none of {names}"))
    }
}

impl From<Exactness> for Arithmetic {
    fn from(e: Exactness) -> Arithmetic {
        match e {
            Exactness::F32 => Arithmetic::F32,
            Exactness::Bf16x2 => Arithmetic::Bf16x2,
            Exactness::Bf16 => Arithmetic::Bf16,
            Exactness::Int8Block | Exactness::Int8BlockStochastic => Arithmetic::Int8Block,
            Exactness::Fp8Delayed => Arithmetic::Simulated(Recipe::Fp8Delayed),
            Exactness::Fp8Tensorwise => Arithmetic::Simulated(Recipe::Fp8Tensorwise),
            Exactness::Fp8Blockwise => Arithmetic::Simulated(Recipe::Fp8Blockwise),
            Exactness::Mxfp8 => Arithmetic::Simulated(Recipe::Mxfp8),
            Exactness::Fp16Block => Arithmetic::Simulated(Recipe::Fp16Block),
        }
    }
}

impl From<Precision> for DType {
    fn from(p: Precision) -> DType {
        match p {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::Bf16,
        }
    }
}

/// A plan as it stands in a config under `plan:`. Every list takes one pattern or several; a pattern that matches nothing is an error.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Plan {
    /// Modules that are forgotten after forward and run again in backward, usually `model.layers.{*}`.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "one_or_many")]
    pub recompute: Vec<String>,
    /// Modules whose parameters (and those below) are not trained.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "one_or_many")]
    pub freeze: Vec<String>,
    /// If any are named: only these modules (and those below) are trained; `freeze` then takes from them.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "one_or_many")]
    pub train: Vec<String>,
    /// Linear layers that get a low-rank adapter; their own weights, and everything not named in `train`, are frozen.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "one_or_many")]
    pub adapters: Vec<String>,
    /// Precision by pattern, later lines winning over earlier ones; without a line, f32.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "pairs")]
    pub precision: Vec<(String, Precision)>,
    /// Exactness of products by pattern, later lines winning over earlier ones; without a line that of `precision`. Norms, attention and
    /// embedding are always exact, and the head takes no block recipe (it stays at bf16).
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "pairs")]
    pub arithmetic: Vec<(String, Exactness)>,
    /// How the model lies on the mesh.
    #[serde(skip_serializing_if = "is_default")]
    pub parallel: ParallelPlan,
}

fn is_default(plan: &ParallelPlan) -> bool {
    *plan == ParallelPlan::default()
}

pub(crate) fn one_or_many<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum OneOrMany {
        One(String),
        Many(Vec<String>),
    }
    Ok(match OneOrMany::deserialize(d)? {
        OneOrMany::One(s) => vec![s],
        OneOrMany::Many(v) => v,
    })
}

/// A map in the order it was written.
pub(crate) fn pairs<'de, D: serde::Deserializer<'de>, P: DeserializeOwned>(d: D) -> Result<Vec<(String, P)>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Form<P> {
        All(P),
        Map(serde_json::Map<String, serde_json::Value>),
        Pairs(Vec<(String, P)>),
    }
    match Form::<P>::deserialize(d)? {
        Form::All(p) => Ok(vec![("**".into(), p)]),
        Form::Pairs(p) => Ok(p),
        Form::Map(m) => m
            .into_iter()
            .map(|(k, v)| serde_json::from_value(v).map(|p| (k, p)).map_err(serde::de::Error::custom))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_a_plan() {
        for e in Exactness::ALL {
            assert_eq!(serde_json::to_value(e).unwrap(), e.name());
            assert_eq!(e.name().parse(), Ok(e));
            // Rounding at random is the one thing that products alone do not tell.
            if e != Exactness::Int8BlockStochastic {
                assert_eq!(Arithmetic::from(e).to_string(), e.name());
            }
        }
        assert!("int8".parse::<Exactness>().unwrap_err().contains("int8_block"));
    }
}
