//! Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1): keys and values of all heads are expanded from one narrow row a token.
//!
//! A head of q and k has a part without positions and a rotary part; the rotary part of k is one for all heads. Values are narrower than
//! keys. The cache of generation holds expanded keys and values; holding the narrow rows instead would take a tenth of it and more work a token.

use std::sync::Arc;

use phalanx_autograd::functions::{self, AttentionSpec};
use phalanx_kernels::rope::Form;
use phalanx_tensor::Tensor;

use super::linear::together;
use super::{Linear, RmsNorm, RopeConfig};
use crate::{Cx, Describe, Module, Result, Visitor};

/// Sizes and options of a [`LatentAttention`].
#[derive(Clone, Debug)]
pub struct LatentAttentionConfig {
    /// Hidden size H.
    pub hidden: usize,
    /// Heads N, of queries, keys and values alike.
    pub heads: usize,
    /// Width of the narrow row that queries come from; none: from the hidden state itself.
    pub q_lora_rank: Option<usize>,
    /// Width of the narrow row that keys and values come from.
    pub kv_lora_rank: usize,
    /// Part of a head of q and k without positions.
    pub nope_dim: usize,
    /// Rotary part of a head of q and k.
    pub rope_dim: usize,
    /// A head of v.
    pub value_dim: usize,
    /// Biases on the projections from and to the hidden state.
    pub bias: bool,
    /// Factor of the scores.
    pub scale: f32,
    /// Rotary embedding of `rope_dim` values.
    pub rope: Arc<RopeConfig>,
    /// Whether pairs of the rotary part are neighbours.
    pub interleaved: bool,
}

enum Queries {
    Whole(Arc<Linear>),
    Narrow { a: Arc<Linear>, norm: Arc<RmsNorm>, b: Arc<Linear> },
}

/// Self-attention over expanded latents.
pub struct LatentAttention {
    q: Queries,
    kv_a_proj_with_mqa: Arc<Linear>,
    kv_a_layernorm: Arc<RmsNorm>,
    kv_b_proj: Arc<Linear>,
    o_proj: Arc<Linear>,
    config: LatentAttentionConfig,
}

/// ε of the norms of narrow rows, whatever the model's other norms have.
const EPS: f32 = 1e-6;

impl LatentAttention {
    /// `prefix.q_proj`, or `prefix.{q_a_proj,q_a_layernorm,q_b_proj}`; `prefix.{kv_a_proj_with_mqa,kv_a_layernorm,kv_b_proj,o_proj}`.
    pub fn named(prefix: &str, c: LatentAttentionConfig) -> LatentAttention {
        let linear = |name: &str, inputs: usize, outputs: usize, bias: bool| {
            Arc::new(Linear::named(&format!("{prefix}.{name}"), inputs, outputs, bias))
        };
        let norm = |name: &str, dim: usize| Arc::new(RmsNorm::named(&format!("{prefix}.{name}"), dim, EPS));
        let q = c.heads * (c.nope_dim + c.rope_dim);
        LatentAttention {
            q: match c.q_lora_rank {
                None => Queries::Whole(linear("q_proj", c.hidden, q, false)),
                Some(rank) => Queries::Narrow {
                    a: linear("q_a_proj", c.hidden, rank, c.bias),
                    norm: norm("q_a_layernorm", rank),
                    b: linear("q_b_proj", rank, q, false),
                },
            },
            kv_a_proj_with_mqa: linear("kv_a_proj_with_mqa", c.hidden, c.kv_lora_rank + c.rope_dim, c.bias),
            kv_a_layernorm: norm("kv_a_layernorm", c.kv_lora_rank),
            kv_b_proj: linear("kv_b_proj", c.kv_lora_rank, c.heads * (c.nope_dim + c.value_dim), false),
            o_proj: linear("o_proj", c.heads * c.value_dim, c.hidden, c.bias),
            config: c,
        }
    }

    /// q [T, N·D] before rotation, and the narrow row with the rotary part of k [T, C + R].
    fn narrow(&self, cx: &mut Cx, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let kv_a = ("kv_a_proj_with_mqa", &self.kv_a_proj_with_mqa);
        match &self.q {
            Queries::Whole(q) => {
                let [q, kv] = together(cx, x, [("q_proj", q), kv_a])?;
                Ok((q, kv))
            }
            Queries::Narrow { a, norm, b } => {
                let [q, kv] = together(cx, x, [("q_a_proj", a), kv_a])?;
                let q = cx.call("q_a_layernorm", norm, q)?;
                Ok((cx.call("q_b_proj", b, q)?, kv))
            }
        }
    }
}

impl Module for LatentAttention {
    /// x [T, H] → [T, H]
    fn forward(&self, cx: &mut Cx, x: Tensor) -> Result<Tensor> {
        let c = &self.config;
        let (t, n, nope) = (x.dim(0), c.heads, c.nope_dim);
        let (q, kv) = self.narrow(cx, &x)?;
        drop(x);
        let tables = c.rope.tables(cx)?;
        let turn = |at: usize| Form { at, interleaved: c.interleaved };
        let (rt, mut tape) = cx.parts();
        let q_tnd = q.into_shape(&[t, n, nope + c.rope_dim])?;
        let q_tnd = functions::rope_form(rt, tape.as_deref_mut(), q_tnd, &tables.cos, &tables.sin, turn(nope))?;
        let k_rot = functions::columns(rt, tape.as_deref_mut(), &kv, c.kv_lora_rank..c.kv_lora_rank + c.rope_dim)?;
        let k_rot = k_rot.into_shape(&[t, 1, c.rope_dim])?;
        let k_rot = functions::rope_form(rt, tape.as_deref_mut(), k_rot, &tables.cos, &tables.sin, turn(0))?;
        let latent = functions::columns(rt, tape, &kv, 0..c.kv_lora_rank)?;
        drop(kv);
        let latent = cx.call("kv_a_layernorm", &self.kv_a_layernorm, latent)?;
        let kv = cx.call("kv_b_proj", &self.kv_b_proj, latent)?.into_shape(&[t, n, nope + c.value_dim])?;
        let (rt, mut tape) = cx.parts();
        let k_nope = functions::columns(rt, tape.as_deref_mut(), &kv, 0..nope)?;
        let v_tnd = functions::columns(rt, tape.as_deref_mut(), &kv, nope..nope + c.value_dim)?;
        drop(kv);
        let k_tnd = functions::join_heads(rt, tape, &k_nope, &k_rot)?;
        let (k_tnd, v_tnd, seqs) = match cx.kv_cache() {
            Some((cache, scope)) => cache.append(scope, &k_tnd, &v_tnd)?,
            None => (k_tnd, v_tnd, Arc::clone(&cx.env().batch().seqs)),
        };
        let spec = AttentionSpec { seqs, scale: c.scale, window: None };
        let (rt, tape) = cx.parts();
        let o_tnd = functions::attention(rt, tape, &q_tnd, &k_tnd, &v_tnd, spec)?;
        cx.call("o_proj", &self.o_proj, o_tnd.into_shape(&[t, n * c.value_dim])?)
    }
}

impl Describe for LatentAttention {
    fn visit(&self, v: &mut Visitor<'_>) {
        match &self.q {
            Queries::Whole(q) => v.child("q_proj", &**q),
            Queries::Narrow { a, norm, b } => {
                v.child("q_a_proj", &**a);
                v.child("q_a_layernorm", &**norm);
                v.child("q_b_proj", &**b);
            }
        }
        v.child("kv_a_proj_with_mqa", &*self.kv_a_proj_with_mqa);
        v.child("kv_a_layernorm", &*self.kv_a_layernorm);
        v.child("kv_b_proj", &*self.kv_b_proj);
        v.child("o_proj", &*self.o_proj);
    }
    fn kind(&self) -> &'static str {
        "latent_attention"
    }
}
