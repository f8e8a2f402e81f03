//! Grouped-query self-attention with rotary positions, optional q/k norms and sliding window.

use std::sync::Arc;

use phalanx_autograd::functions::{self, AttentionSpec};
use phalanx_tensor::Tensor;

use super::linear::together;
use super::{Linear, RmsNorm, RopeConfig};
use crate::{Cx, Describe, Module, Result, Visitor};

/// Sizes and options of an [`Attention`].
#[derive(Clone, Debug)]
pub struct AttentionConfig {
    /// Hidden size H.
    pub hidden: usize,
    /// Query heads N.
    pub heads: usize,
    /// Key/value heads K.
    pub kv_heads: usize,
    /// Head dimension D (need not be H / N).
    pub head_dim: usize,
    /// Biases on q, k and v.
    pub qkv_bias: bool,
    /// Bias on the output projection.
    pub o_bias: bool,
    /// Norm over D of each query and key head before rotation (qwen3), with this epsilon.
    pub qk_norm: Option<f32>,
    /// Sliding window, if the layer has one.
    pub window: Option<usize>,
    /// Rotary embedding.
    pub rope: Arc<RopeConfig>,
}

/// Self-attention.
pub struct Attention {
    q_proj: Arc<Linear>,
    k_proj: Arc<Linear>,
    v_proj: Arc<Linear>,
    o_proj: Arc<Linear>,
    q_norm: Option<Arc<RmsNorm>>,
    k_norm: Option<Arc<RmsNorm>>,
    config: AttentionConfig,
}

impl Attention {
    /// `prefix.{q,k,v,o}_proj`, and `prefix.{q,k}_norm` if the config asks for them.
    pub fn named(prefix: &str, c: AttentionConfig) -> Attention {
        let linear = |name: &str, i: usize, o: usize, bias: bool| {
            Arc::new(Linear::named(&format!("{prefix}.{name}"), i, o, bias))
        };
        let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let norm =
            |name: &str| c.qk_norm.map(|eps| Arc::new(RmsNorm::named(&format!("{prefix}.{name}"), c.head_dim, eps)));
        Attention {
            q_proj: linear("q_proj", c.hidden, q, c.qkv_bias),
            k_proj: linear("k_proj", c.hidden, kv, c.qkv_bias),
            v_proj: linear("v_proj", c.hidden, kv, c.qkv_bias),
            o_proj: linear("o_proj", q, c.hidden, c.o_bias),
            q_norm: norm("q_norm"),
            k_norm: norm("k_norm"),
            config: c,
        }
    }
}

impl Module for Attention {
    /// x [T, H] → [T, H]
    fn forward(&self, cx: &mut Cx, x: Tensor) -> Result<Tensor> {
        let c = &self.config;
        let t = x.dim(0);
        let projections = [("q_proj", &self.q_proj), ("k_proj", &self.k_proj), ("v_proj", &self.v_proj)];
        let [q, k, v] = together(cx, &x, projections)?;
        drop(x);
        // As many heads as the projections that are here make: some of them may be on other ranks.
        let heads = |x: &Tensor| x.dim(1) / c.head_dim;
        let (q_width, n, k_heads) = (q.dim(1), heads(&q), heads(&k));
        let q_tnd = q.into_shape(&[t, n, c.head_dim])?;
        let k_tkd = k.into_shape(&[t, k_heads, c.head_dim])?;
        let v_tkd = v.into_shape(&[t, k_heads, c.head_dim])?;
        let q_tnd = match &self.q_norm {
            Some(norm) => cx.call("q_norm", norm, q_tnd)?,
            None => q_tnd,
        };
        let k_tkd = match &self.k_norm {
            Some(norm) => cx.call("k_norm", norm, k_tkd)?,
            None => k_tkd,
        };
        let tables = c.rope.tables(cx)?;
        let (rt, mut tape) = cx.parts();
        let q_tnd = functions::rope(rt, tape.as_deref_mut(), q_tnd, &tables.cos, &tables.sin)?;
        let k_tkd = functions::rope(rt, tape, k_tkd, &tables.cos, &tables.sin)?;
        let scale = 1.0 / (c.head_dim as f32).sqrt();
        let o_tnd = if let Some(context) = cx.env().batch().context.clone() {
            let (rt, tape) = cx.parts();
            context.attention(rt, tape, [&q_tnd, &k_tkd, &v_tkd], scale, c.window)?
        } else {
            let (k_tkd, v_tkd, seqs) = match cx.kv_cache() {
                Some((cache, scope)) => cache.append(scope, &k_tkd, &v_tkd)?,
                None => (k_tkd, v_tkd, Arc::clone(&cx.env().batch().seqs)),
            };
            let (rt, tape) = cx.parts();
            functions::attention(rt, tape, &q_tnd, &k_tkd, &v_tkd, AttentionSpec { seqs, scale, window: c.window })?
        };
        cx.call("o_proj", &self.o_proj, o_tnd.into_shape(&[t, q_width])?)
    }
}

impl Describe for Attention {
    fn visit(&self, v: &mut Visitor<'_>) {
        v.child("q_proj", &*self.q_proj);
        v.child("k_proj", &*self.k_proj);
        v.child("v_proj", &*self.v_proj);
        if let (Some(q), Some(k)) = (&self.q_norm, &self.k_norm) {
            v.child("q_norm", &**q);
            v.child("k_norm", &**k);
        }
        v.child("o_proj", &*self.o_proj);
    }

    fn kind(&self) -> &'static str {
        "attention"
    }

    fn head_dim(&self) -> Option<usize> {
        Some(self.config.head_dim)
    }
}
