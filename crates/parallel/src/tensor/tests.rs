//! Cuts of a small decoder, what is refused, and the moves at borders.

use std::sync::Arc;

use phalanx_autograd::Tape;
use phalanx_comm::{CommError, run_ranks};
use phalanx_nn::layers::{
    Attention, AttentionConfig, Embedding, GatedMlp, MlpConfig, RmsNorm, RopeConfig, RopeScaling,
};
use phalanx_nn::{Describe, Parameter, Visitor, chunk};
use phalanx_tensor::{Category, Runtime};

use super::layout::Layout;
use super::moves::{self, Gradient, Rows};
use super::{Style, Tensor};

/// One block: 4 query heads over 2 key heads of 3, biases, norms of heads, 10 units, a tied head of 7 tokens.
struct Tiny {
    embed_tokens: Embedding,
    norm: RmsNorm,
    self_attn: Attention,
    mlp: GatedMlp,
    lm_head: Head,
}

struct Head(Parameter);

impl Describe for Head {
    fn visit(&self, v: &mut Visitor<'_>) {
        v.parameter(&self.0);
    }
    fn kind(&self) -> &'static str {
        "head"
    }
}

impl Describe for Tiny {
    fn visit(&self, v: &mut Visitor<'_>) {
        v.child("embed_tokens", &self.embed_tokens);
        v.child("norm", &self.norm);
        v.child("self_attn", &self.self_attn);
        v.child("mlp", &self.mlp);
        v.child("lm_head", &self.lm_head);
    }
    fn kind(&self) -> &'static str {
        "causal_lm"
    }
}

fn tiny() -> Tiny {
    let rope = Arc::new(RopeConfig { theta: 1e4, dim: 2, scaling: RopeScaling::Default });
    let attention = AttentionConfig {
        hidden: 5,
        heads: 4,
        kv_heads: 2,
        head_dim: 3,
        qkv_bias: true,
        o_bias: true,
        qk_norm: Some(1e-6),
        window: None,
        rope,
    };
    let mlp = MlpConfig { hidden: 5, intermediate: 12, bias: true, act: phalanx_kernels::glu::Act::Silu };
    let embed_tokens = Embedding::named("embed_tokens", 7, 5);
    Tiny {
        lm_head: Head(embed_tokens.weight().clone()),
        embed_tokens,
        norm: RmsNorm::named("norm", 5, 1e-6),
        self_attn: Attention::named("self_attn", attention),
        mlp: GatedMlp::named("mlp", mlp),
    }
}

fn plan(styles: &[(&str, Style)]) -> Tensor {
    Tensor { styles: styles.iter().map(|&(p, s)| (p.into(), s)).collect(), ..Tensor::default() }
}

/// Cut, holders and whether the gradient is a part, for rank `rank` of `ranks`.
fn slices(styles: &[(&str, Style)], ranks: usize, rank: usize) -> impl Fn(&str) -> String {
    let model = tiny();
    let layout = Layout::new(&model, &plan(styles), ranks, rank).unwrap();
    let all = phalanx_nn::parameters(&model);
    move |name| {
        let p = all.iter().find(|p| p.name() == name).unwrap();
        let s = layout.slice_of(p);
        let cut = s.cut.map_or("whole".to_owned(), |(dim, r)| format!("{dim}: {r:?}"));
        format!("{cut} on {:?}{}", s.holders, if s.partial { ", a part" } else { "" })
    }
}

fn refused(styles: &[(&str, Style)], ranks: usize) -> String {
    Layout::new(&tiny(), &plan(styles), ranks, 0).err().unwrap().to_string()
}

#[test]
fn a_decoder_is_cut_by_heads_units_and_tokens() {
    let s = slices(&[], 4, 1);
    assert_eq!(s("self_attn.q_proj.weight"), "0: 3..6 on 1..2");
    assert_eq!(s("self_attn.q_proj.bias"), "0: 3..6 on 1..2");
    // Query heads 0 and 1 attend to key head 0.
    assert_eq!(s("self_attn.k_proj.weight"), "0: 0..3 on 0..2, a part");
    assert_eq!(s("self_attn.v_proj.bias"), "0: 0..3 on 0..2, a part");
    assert_eq!(s("self_attn.o_proj.weight"), "1: 3..6 on 1..2");
    assert_eq!(s("self_attn.o_proj.bias"), "whole on 0..4, a part");
    assert_eq!(s("self_attn.k_norm.weight"), "whole on 0..4, a part");
    assert_eq!(s("mlp.up_proj.weight"), "0: 3..6 on 1..2");
    assert_eq!(s("mlp.down_proj.weight"), "1: 3..6 on 1..2");
    assert_eq!(s("norm.weight"), "whole on 0..4, a part");
    assert_eq!(s("embed_tokens.weight"), "0: 2..4 on 1..2");
    assert_eq!(slices(&[], 4, 3)("embed_tokens.weight"), "0: 6..7 on 3..4");
    assert_eq!(slices(&[], 2, 1)("self_attn.k_proj.weight"), "0: 3..6 on 1..2");
    assert_eq!(slices(&[], 1, 0)("norm.weight"), "whole on 0..1");
}

#[test]
fn lines_of_a_plan_go_before_the_usual_and_later_ones_before_earlier_ones() {
    let s = slices(&[("**", Style::Replicate), ("self_attn", Style::Replicate), ("mlp", Style::Sequence)], 3, 1);
    assert_eq!(s("self_attn.q_proj.weight"), "whole on 0..3");
    assert_eq!(s("self_attn.k_norm.weight"), "whole on 0..3");
    assert_eq!(s("mlp.up_proj.weight"), "whole on 0..3, a part");
    assert_eq!(s("embed_tokens.weight"), "whole on 0..3");
}

#[test]
fn what_cannot_be_cut_is_refused_with_the_mend() {
    let e = refused(&[], 3);
    assert!(e.contains("4 heads of self_attn.q_proj cannot be cut into tp = 3"), "{e}");
    assert!(e.contains("choose tp among 1, 2, 4, or") && e.contains("\"**.self_attn\": replicate"), "{e}");
    let e = refused(&[("self_attn", Style::Replicate)], 5);
    assert!(e.contains("12 units of mlp.gate_proj cannot be cut into tp = 5"), "{e}");
    assert!(e.contains("1, 2, 3, 4, 6, 12") && e.contains("\"**.mlp\": replicate"), "{e}");
    let e = refused(&[("mlpp", Style::Sequence)], 2);
    assert!(e.contains("\"mlpp\" matches no module"), "{e}");
    for (line, why) in [
        (("mlp", Style::Column), "mlp is an mlp, named column: column and row are for linear layers"),
        (("mlp.up_proj", Style::Vocabulary), "vocabulary is for the embedding and the head"),
        (("mlp.up_proj", Style::Sequence), "has gathered all rows"),
        (("mlp.up_proj", Style::Replicate), "its layers with it"),
        (("mlp.down_proj", Style::Column), "mlp has 0 row layers"),
        (("self_attn", Style::Sequence), "attention sees all rows"),
        (("embed_tokens", Style::Sequence), "at the border of the model"),
        (("lm_head", Style::Replicate), "embed_tokens.weight is used at two places"),
    ] {
        let e = refused(&[line], 2);
        assert!(e.contains(why), "{line:?}: {e}");
    }
    let tangled = refused(&[("mlp.gate_proj", Style::Row), ("mlp.up_proj", Style::Row)], 2);
    assert!(tangled.contains("no layer of mlp is column"), "{tangled}");
}

/// 5 rows of 3 on 3 ranks are 2, 2, 1; one row on 3 ranks is 1, 0, 0.
#[test]
fn moves_are_each_others_adjoint() {
    for total in [5, 1, 0] {
        run_ranks(3, |comm| {
            let rt = Runtime::new(1);
            let (rank, own) = (comm.rank(), chunk(total, 3, comm.rank()));
            let tensor = |rows: usize, from: usize, scale: f32| {
                let values: Vec<f32> = (0..rows * 3).map(|i| scale * (from * 3 + i) as f32).collect();
                rt.from_f32(&[rows, 3], &values, Category::Activations).unwrap()
            };
            let rows = || Rows { group: comm.clone(), total };
            let all = tensor(total, 0, 1.0).f32().unwrap().to_vec();
            let mine = |x: &[f32]| x[own.start * 3..own.end * 3].to_vec();
            for (gradient, factor) in [(Gradient::Part, 6.0), (Gradient::Whole, 1.0 + rank as f32)] {
                for again in [false, true] {
                    let mut tape = Tape::new();
                    let x = tape.input(tensor(own.len(), own.start, 1.0));
                    let y = moves::gather(&rt, Some(&mut tape), rows(), &x, gradient, again).unwrap();
                    assert_eq!(y.f32().unwrap(), all);
                    assert_eq!(tape.save(&y).get(&rt).unwrap().f32().unwrap(), all);
                    // Ranks send back 1, 2 and 3 times the rows.
                    let back = tape.backward(&rt, &y, tensor(total, 0, 1.0 + rank as f32)).unwrap();
                    let want: Vec<f32> = mine(&all).iter().map(|x| x * factor).collect();
                    assert_eq!(back.of(&x).unwrap().f32().unwrap(), want);
                }
            }
            for scattered in [true, false] {
                let mut tape = Tape::new();
                let y = tape.input(tensor(total, 0, 1.0 + rank as f32));
                let (own_rows, factor) = if scattered {
                    (moves::reduce_scatter(&rt, Some(&mut tape), rows(), &y, false), 6.0)
                } else {
                    (moves::take(&rt, Some(&mut tape), rows(), &y), 1.0 + rank as f32)
                };
                let own_rows = own_rows.unwrap();
                let want: Vec<f32> = mine(&all).iter().map(|x| x * factor).collect();
                assert_eq!(own_rows.f32().unwrap(), want);
                let back = tape.backward(&rt, &own_rows, tensor(own.len(), own.start, 1.0)).unwrap();
                assert_eq!(back.of(&y).unwrap().f32().unwrap(), all);
            }
            Ok::<_, CommError>(())
        })
        .unwrap();
    }
}
