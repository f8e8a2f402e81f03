//! Attention over the ranks of a group is the attention of one rank.

use std::sync::Arc;

use phalanx_autograd::Tape;
use phalanx_autograd::functions::{AttentionSpec, attention};
use phalanx_comm::{Communicator, run_ranks};
use phalanx_kernels::attention::{Attention, plain};
use phalanx_nn::{Batch, ContextParallel, NnError};
use phalanx_parallel::context::{Context, ContextForm, Partition};
use phalanx_tensor::{Category, Runtime};
use phalanx_testkit::{rel_norm, values};
use proptest::prelude::*;

/// An attention with its inputs, for all rows.
#[derive(Clone, Debug)]
struct Case {
    documents: Vec<usize>,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    window: Option<usize>,
}

/// Values of all rows: output, and the gradients of q, k and v.
type Values = [Vec<f32>; 4];
const NAMES: [&str; 4] = ["output", "dq", "dk", "dv"];
const SCALE: f32 = 0.4;

impl Case {
    fn rows(&self) -> usize {
        self.documents.iter().sum()
    }

    /// q, k, v and the gradient of the output.
    fn inputs(&self) -> Values {
        let n = |heads| self.rows() * heads * self.dim;
        let sharp = |seed, n| values(seed, n).into_iter().map(|v| 2.0 * v).collect();
        [sharp(1, n(self.heads)), sharp(2, n(self.kv_heads)), values(3, n(self.kv_heads)), values(4, n(self.heads))]
    }

    fn widths(&self) -> [usize; 4] {
        [self.heads, self.kv_heads, self.kv_heads, self.heads].map(|heads| heads * self.dim)
    }

    /// In f64, a row at a time.
    fn reference(&self) -> Values {
        let batch = Batch::causal(&self.documents);
        let a = Attention {
            seqs: &batch.seqs,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.dim,
            value_dim: self.dim,
            scale: SCALE,
            window: self.window,
        };
        let [q, k, v, dout] = self.inputs();
        let (mut out, mut lse) = (vec![0.0; q.len()], vec![0.0; self.rows() * self.heads]);
        let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; k.len()]);
        plain::forward(&a, &q, &k, &v, &mut out, &mut lse);
        plain::backward(&a, &q, &k, &v, &out, &lse, &dout, &mut dq, &mut dk, &mut dv);
        [out, dq, dk, dv]
    }

    /// As one rank does it.
    fn one_rank(&self) -> Vec<f32> {
        let rt = Runtime::new(1);
        let [q, k, v, _] = self.inputs();
        let t = |values: &[f32], heads| {
            rt.from_f32(&[self.rows(), heads, self.dim], values, Category::Activations).unwrap()
        };
        let spec = AttentionSpec { seqs: Batch::causal(&self.documents).seqs, scale: SCALE, window: self.window };
        let (q, k, v) = (t(&q, self.heads), t(&k, self.kv_heads), t(&v, self.kv_heads));
        attention(&rt, None, &q, &k, &v, spec).unwrap().f32().unwrap().to_vec()
    }

    /// Over `ranks` ranks. The values of each row come from the rank that holds it.
    fn over(&self, ranks: usize, form: ContextForm, partition: Option<Partition>) -> Result<Values, String> {
        let results = run_ranks(ranks, |comm| self.rank(&comm, form, partition)).map_err(|e| e.to_string())?;
        let mut all = self.reference().map(|v| vec![f32::NAN; v.len()]);
        let [q, kv, _, _] = self.widths();
        for (rows, values) in results {
            for ((all, values), width) in all.iter_mut().zip(values).zip([q, q, kv, kv]) {
                let mut from = 0;
                for r in &rows {
                    let n = r.len() * width;
                    all[r.start * width..r.end * width].copy_from_slice(&values[from..from + n]);
                    from += n;
                }
                // A row that only takes part sees nothing and is seen by nobody.
                assert!(values[from..].iter().all(|&v| v == 0.0));
            }
        }
        Ok(all)
    }

    fn rank(
        &self,
        comm: &Communicator,
        form: ContextForm,
        partition: Option<Partition>,
    ) -> Result<(Vec<std::ops::Range<usize>>, Values), NnError> {
        let rt = Runtime::new(1);
        let context = Context::new(comm, form, partition).map_err(|e| NnError::Parallel(e.to_string()))?;
        let share = context.share(&self.documents);
        assert_eq!(share.tokens(), context.held(self.rows()));
        let t = share.batch.tokens();
        let mut inputs = self.inputs().into_iter().zip(self.widths()).map(|(values, width)| {
            let mut own: Vec<f32> =
                share.rows.iter().flat_map(|r| values[r.start * width..r.end * width].to_vec()).collect();
            own.resize(t * width, 0.5);
            rt.from_f32(&[t, width / self.dim, self.dim], &own, Category::Activations)
        });
        let mut tape = Tape::new();
        let mut next = || inputs.next().expect("there are four");
        let (q, k, v, dout) = (tape.input(next()?), tape.input(next()?), tape.input(next()?), next()?);
        let attention = Arc::clone(share.batch.context.as_ref().expect("it is dealt"));
        // Without a tape first: that must not change anything.
        let plain = attention.attention(&rt, None, [&q, &k, &v], SCALE, self.window)?;
        let out = attention.attention(&rt, Some(&mut tape), [&q, &k, &v], SCALE, self.window)?;
        assert_eq!(plain.f32()?, out.f32()?);
        let mut gradients = tape.backward(&rt, &out, dout)?;
        let mut gradient = |x| gradients.take(x).expect("it was reached").f32().map(<[f32]>::to_vec);
        Ok((share.rows, [out.f32()?.to_vec(), gradient(&q)?, gradient(&k)?, gradient(&v)?]))
    }
}

/// The forms that `ranks` ranks can take for `heads` heads.
fn forms(ranks: usize, heads: usize) -> Vec<ContextForm> {
    let mut out = vec![ContextForm::AllGather, ContextForm::Ring];
    if heads.is_multiple_of(ranks) {
        out.push(ContextForm::Ulysses);
    }
    let inner = (2..ranks).filter(|u| ranks.is_multiple_of(*u) && heads.is_multiple_of(*u));
    out.extend(inner.map(|ulysses| ContextForm::Hybrid { ulysses }));
    out
}

fn check(case: &Case, ranks: usize) {
    let (want, one) = (case.reference(), case.one_rank());
    for form in forms(ranks, case.heads) {
        for partition in [None, Some(Partition::Contiguous), Some(Partition::ZigZag)] {
            let what = format!("{case:?} over {ranks} ranks, {form:?}, {partition:?}");
            let got = case.over(ranks, form, partition).unwrap_or_else(|e| panic!("{what}: {e}"));
            for ((got, want), name) in got.iter().zip(&want).zip(NAMES) {
                // Where every row sees one key only, dq and dk are zero but for rounding: hence a floor under the norm.
                let floor = 0.03 * (want.len() as f64).sqrt();
                let norm = want.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>().sqrt();
                let e = rel_norm(got, want) * (norm / norm.max(floor)).min(1.0);
                assert!(e < 2e-6 || want.is_empty(), "{name} of {what}: {e}");
            }
            if matches!(form, ContextForm::AllGather | ContextForm::Ulysses) {
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&got[0]), bits(&one), "{what}: the bits of one rank");
            }
        }
    }
}

#[test]
fn every_form_gives_what_one_rank_gives() {
    let case = |documents: &[usize], heads, kv_heads, dim, window| Case {
        documents: documents.to_vec(),
        heads,
        kv_heads,
        dim,
        window,
    };
    check(&case(&[150, 1, 70, 3], 4, 2, 16, None), 2);
    check(&case(&[150, 1, 70, 3], 6, 2, 20, Some(33)), 3);
    check(&case(&[300], 8, 2, 8, None), 4);
    check(&case(&[5, 200, 0, 64], 12, 4, 8, Some(70)), 6);
    // Fewer rows than ranks; none at all.
    check(&case(&[2, 1], 5, 1, 4, None), 5);
    check(&case(&[1], 4, 4, 4, Some(1)), 4);
    check(&case(&[], 6, 3, 4, None), 3);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_documents_windows_and_groups(
        documents in proptest::collection::vec(0usize..60, 0..6),
        ranks in proptest::sample::select(vec![2usize, 3, 4, 5]),
        kv_heads in 1usize..4,
        group in 1usize..4,
        dim in 1usize..12,
        window in proptest::option::of(1usize..50),
    ) {
        check(&Case { documents, heads: kv_heads * group, kv_heads, dim, window }, ranks);
    }
}

#[test]
fn gradients_are_finite_differences() {
    let case = Case { documents: vec![7, 4], heads: 4, kv_heads: 2, dim: 3, window: Some(5) };
    let loss = |inputs: &Values| -> f64 {
        let batch = Batch::causal(&case.documents);
        let a = Attention {
            seqs: &batch.seqs,
            heads: 4,
            kv_heads: 2,
            head_dim: 3,
            value_dim: 3,
            scale: SCALE,
            window: case.window,
        };
        let (mut out, mut lse) = (vec![0.0; inputs[0].len()], vec![0.0; 44]);
        plain::forward(&a, &inputs[0], &inputs[1], &inputs[2], &mut out, &mut lse);
        out.iter().zip(&inputs[3]).map(|(&o, &g)| f64::from(o) * f64::from(g)).sum()
    };
    let inputs = case.inputs();
    for form in forms(4, 4) {
        let got = case.over(4, form, None).unwrap();
        for input in 0..3 {
            for i in 0..inputs[input].len() {
                let h = 1e-2f32;
                let at = |delta: f32| {
                    let mut moved = inputs.clone();
                    moved[input][i] += delta;
                    loss(&moved)
                };
                let slope = (8.0 * (at(h) - at(-h)) - (at(2.0 * h) - at(-2.0 * h))) / (12.0 * f64::from(h));
                let g = f64::from(got[1 + input][i]);
                assert!(
                    (g - slope).abs() < 2e-4 * (1.0 + slope.abs()),
                    "{form:?}, {} at {i}: {g}, {slope}",
                    NAMES[1 + input]
                );
            }
        }
    }
}

#[test]
fn positions_and_targets_are_those_of_the_documents_under_the_same_table() {
    let documents = [5, 0, 1, 11, 3];
    let positions: Vec<u32> = documents.iter().flat_map(|&n| 0..n as u32).collect();
    for ranks in [1, 2, 3, 5, 23] {
        for partition in [Partition::Contiguous, Partition::ZigZag] {
            let shares = run_ranks(ranks, |comm| {
                Ok::<_, String>(
                    Context::new(&comm, ContextForm::AllGather, Some(partition))
                        .map_err(|e| e.to_string())?
                        .share(&documents.map(|n| n as usize)),
                )
            })
            .unwrap();
            let mut seen = 0;
            for share in shares {
                let own = share.take(&positions, u32::MAX);
                seen += share.tokens();
                assert_eq!(own.len(), share.batch.tokens());
                if share.tokens() > 0 {
                    assert_eq!(own, share.batch.positions, "{ranks} ranks, {partition:?}");
                } else {
                    assert_eq!((&own[..], &share.batch.positions[..]), (&[u32::MAX][..], &[0][..]));
                }
            }
            assert_eq!(seen, positions.len(), "every token is on one rank");
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_with_the_mend() {
    let case = Case { documents: vec![20], heads: 4, kv_heads: 2, dim: 4, window: None };
    let e = case.over(3, ContextForm::Ulysses, None).unwrap_err();
    assert!(e.contains("4 query heads") && e.contains("3 ranks") && e.contains("context: ring"), "{e}");
    let e = case.over(4, ContextForm::Hybrid { ulysses: 3 }, None).unwrap_err();
    assert!(e.contains("ulysses = 3 does not divide the 4 ranks") && e.contains("1, 2, 4"), "{e}");
}
