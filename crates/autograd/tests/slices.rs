//! Functions of which every rank has a slice, against the whole.

use std::ops::Range;
use std::sync::{Arc, Barrier, Mutex};

use phalanx_autograd::functions::{
    Across, HeadSpec, LossOutput, Param, Part, Rows, VocabularySlice, dropout, dropout_part, embedding_slice,
    linear_cross_entropy,
};
use phalanx_autograd::{GradSlot, Result, Tape};
use phalanx_kernels::gemm::Arithmetic;
use phalanx_tensor::rng::Stream;
use phalanx_tensor::{Category, Runtime};
use phalanx_testkit::{rel_norm, values};

/// Ranks as threads.
struct Meeting {
    barrier: Barrier,
    given: Mutex<Vec<Vec<f64>>>,
    calls: Mutex<usize>,
}

struct Rank {
    rank: usize,
    ranks: usize,
    meeting: Arc<Meeting>,
}

impl Across for Rank {
    fn ranks(&self) -> usize {
        self.ranks
    }
    fn all_gather(&self, mine: &[f64], all: &mut [f64]) -> Result<()> {
        self.meeting.given.lock().unwrap()[self.rank] = mine.to_vec();
        *self.meeting.calls.lock().unwrap() += 1;
        self.meeting.barrier.wait();
        all.copy_from_slice(&self.meeting.given.lock().unwrap().concat());
        self.meeting.barrier.wait();
        Ok(())
    }
}

/// Loss, gradient of the hidden rows, gradient of the head.
type Found = (LossOutput, Vec<f32>, Vec<f32>);

const H: usize = 5;

fn head(hidden: &[f32], head: &[f32], targets: &Arc<[i32]>, slice: Option<VocabularySlice>) -> Found {
    let rt = Runtime::new(1);
    let mut tape = Tape::new();
    let x = tape.input(rt.from_f32(&[hidden.len() / H, H], hidden, Category::Activations).unwrap());
    let slot = GradSlot::new();
    let weight = rt.from_f32(&[head.len() / H, H], head, Category::Weights).unwrap();
    let weight = Param::new(weight, Some(slot.clone()));
    let spec = HeadSpec { weight, targets: Arc::clone(targets), chunk_bytes: 1, arithmetic: Arithmetic::F32, slice };
    let out = linear_cross_entropy(&rt, Some(&mut tape), &x, spec).unwrap();
    let one = rt.from_f32(&[1], &[1.0], Category::Activations).unwrap();
    let dx = tape.backward(&rt, &out.loss, one).unwrap().of(&x).unwrap().f32().unwrap().to_vec();
    (out, dx, slot.take().unwrap().f32().unwrap().to_vec())
}

/// Every rank's result, for slices of these tokens.
fn heads(x: &[f32], w: &[f32], targets: &Arc<[i32]>, slices: &[Range<usize>]) -> (Vec<Found>, usize) {
    let ranks = slices.len();
    let meeting = Arc::new(Meeting {
        barrier: Barrier::new(ranks),
        given: Mutex::new(vec![vec![]; ranks]),
        calls: Mutex::new(0),
    });
    let found = std::thread::scope(|s| {
        let run = |(rank, tokens): (usize, &Range<usize>)| {
            let across: Arc<dyn Across> = Arc::new(Rank { rank, ranks, meeting: Arc::clone(&meeting) });
            let (rows, targets) = (w[tokens.start * H..tokens.end * H].to_vec(), Arc::clone(targets));
            let slice = VocabularySlice { tokens: tokens.clone(), vocab: w.len() / H, across };
            s.spawn(move || head(x, &rows, &targets, Some(slice)))
        };
        let threads: Vec<_> = slices.iter().enumerate().map(run).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let calls = *meeting.calls.lock().unwrap() / ranks;
    (found, calls)
}

#[test]
fn a_loss_over_slices_is_that_over_the_whole() {
    // 40 rows are three chunks, the middle one without a target that counts; 13 tokens on 4 ranks are 4, 4, 4 and 1, on 7 the last has none.
    let targets: Arc<[i32]> =
        (0..40).map(|t| if (16..32).contains(&t) || t % 5 == 0 { -100 } else { (t * 7) % 13 }).collect();
    let (x, mut w) = (values(1, 40 * H), values(2, 13 * H));
    // Logits that only the greatest of all slices keeps in range.
    w[..H].iter_mut().for_each(|w| *w *= 80.0);
    let (whole, dx, dw) = head(&x, &w, &targets, None);
    let four = [0..4, 4..8, 8..12, 12..13];
    let seven = [0..2, 2..4, 4..6, 6..8, 8..10, 10..13, 13..13];
    for slices in [&four[..], &seven[..]] {
        let (ranks, calls) = heads(&x, &w, &targets, slices);
        assert_eq!(calls, 2, "the chunk without targets says nothing");
        let mut sum = vec![0f32; dx.len()];
        let mut rows = vec![];
        for (out, dx, dw) in &ranks {
            assert_eq!(out.sum, ranks[0].0.sum, "the same on all ranks, to the bit");
            assert_eq!(out.logp, ranks[0].0.logp);
            sum.iter_mut().zip(dx).for_each(|(s, d)| *s += d);
            rows.extend_from_slice(dw);
        }
        let out = &ranks[0].0;
        assert_eq!(out.sum.count, whole.sum.count);
        assert!((out.sum.sum / whole.sum.sum - 1.0).abs() < 1e-6, "{} against {}", out.sum.sum, whole.sum.sum);
        assert!(rel_norm(&out.logp, &whole.logp) < 1e-6);
        assert!(rel_norm(&sum, &dx) < 1e-6 && rel_norm(&rows, &dw) < 1e-6);
    }
}

#[test]
fn without_any_target_there_are_zeros() {
    let targets: Arc<[i32]> = Arc::from([-100; 20]);
    let (ranks, calls) = heads(&values(1, 20 * H), &values(2, 13 * H), &targets, &[0..7, 7..13]);
    assert_eq!(calls, 0);
    for (out, dx, dw) in ranks {
        assert_eq!((out.sum.sum, out.sum.count), (0.0, 0));
        assert!(out.logp.iter().chain(&dx).chain(&dw).all(|&x| x == 0.0));
    }
}

#[test]
fn slices_of_an_embedding_add_up() {
    let rt = Runtime::new(2);
    let (ids, table): (Arc<[u32]>, _) = (Arc::from([3, 0, 6, 3, 5]), values(1, 7 * H));
    let dy = values(2, 5 * H);
    let run = |rows: Range<usize>, ids: &Arc<[u32]>| -> Result<(Vec<f32>, Vec<f32>)> {
        let (mut tape, slot) = (Tape::new(), GradSlot::new());
        let part = rt.from_f32(&[rows.len(), H], &table[rows.start * H..rows.end * H], Category::Weights).unwrap();
        let param = Param::new(part, Some(slot.clone()));
        let y = embedding_slice(&rt, Some(&mut tape), ids, param, Rows { first: rows.start, vocab: 7 })?;
        let grad = rt.from_f32(&[5, H], &dy, Category::Activations).unwrap();
        tape.backward(&rt, &y, grad).unwrap();
        Ok((y.f32().unwrap().to_vec(), slot.take().unwrap().f32().unwrap().to_vec()))
    };
    let (y, d) = run(0..7, &ids).unwrap();
    let (mut sum, mut rows) = (vec![0f32; y.len()], vec![]);
    for part in [0..3, 3..6, 6..7, 7..7] {
        let (y, d) = run(part, &ids).unwrap();
        sum.iter_mut().zip(&y).for_each(|(s, y)| *s += y);
        rows.extend(d);
    }
    assert_eq!((sum, rows), (y, d), "one summand is not zero");
    let beyond = run(0..3, &Arc::from([0, 1, 7, 2, 2])).err().unwrap().to_string();
    assert!(beyond.contains("id 7") && beyond.contains("7 rows"), "{beyond}");
}

#[test]
fn parts_draw_their_part_of_one_dropout_mask() {
    let rt = Runtime::new(1);
    let (x, stream) = (values(3, 9 * 8), Stream::new(1, "layer.lora_dropout"));
    let tensor = |shape: &[usize], x: &[f32]| rt.from_f32(shape, x, Category::Activations).unwrap();
    let whole = dropout(&rt, None, &tensor(&[9, 8], &x), 0.5, stream).unwrap().f32().unwrap().to_vec();
    let rows = dropout_part(&rt, None, &tensor(&[4, 8], &x[40..]), 0.5, stream, Part { row: 5, ..Part::default() });
    assert_eq!(rows.unwrap().f32().unwrap(), &whole[40..]);
    let columns = |x: &[f32]| x.chunks(8).flat_map(|row| row[3..6].to_vec()).collect::<Vec<f32>>();
    let part = Part { column: Some((3, 8)), ..Part::default() };
    let y = dropout_part(&rt, None, &tensor(&[9, 3], &columns(&x)), 0.5, stream, part);
    assert_eq!(y.unwrap().f32().unwrap(), columns(&whole));
}
