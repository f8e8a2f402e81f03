//! What the layouts are trained on.

use phalanx_data::Batch as TokenBatch;
use phalanx_tensor::rng::Stream;

use crate::window::MicroBatch;

/// Samples a step, over all ranks.
const SAMPLES: usize = 8;

/// A sample: documents, each with its ids and which of them are trained on.
pub(super) type Sample = Vec<(Vec<u32>, Vec<bool>)>;

/// The samples of a step; every step trains on the same ones.
pub(super) fn samples(vocab: usize) -> Vec<Sample> {
    let s = Stream::new(7, "layouts.data");
    let mut at = 0;
    let mut draw = |below: usize| {
        at += 1;
        (s.uniform(at) * below as f32) as usize
    };
    let sample = |i: usize, draw: &mut dyn FnMut(usize) -> usize| {
        let document = |d: usize, draw: &mut dyn FnMut(usize) -> usize| {
            let len = [23, 1, 9, 17, 2, 40, 5][(3 * i + d) % 7];
            let ids: Vec<u32> = (0..len).map(|_| draw(vocab) as u32).collect();
            // A prompt of some length is not trained on; sample 3 has no label at all.
            let prompt = if i == 3 { len } else { draw(len) / (1 + i % 3) };
            let trained = (0..len).map(|t| t >= prompt).collect();
            (ids, trained)
        };
        (0..1 + i % 3).map(|d| document(d, draw)).collect::<Sample>()
    };
    (0..SAMPLES).map(|i| sample(i, &mut draw)).collect()
}

/// The `count` micro-batches of one of `shares` shares: every `shares`-th sample, the first micro-batches having the most.
pub(super) fn micro_batches(samples: &[Sample], share: usize, shares: usize, count: usize) -> Vec<MicroBatch> {
    let own: Vec<&Sample> = samples.iter().skip(share).step_by(shares).collect();
    let most = samples.len().div_ceil(shares).div_ceil(count).max(1);
    let batch = |samples: &[&Sample]| {
        let documents = samples.iter().flat_map(|s| s.iter());
        TokenBatch::from_documents(documents.map(|(ids, trained)| (0, ids.as_slice(), trained.as_slice())))
    };
    let mut out: Vec<TokenBatch> = own.chunks(most).map(batch).collect();
    out.resize_with(count, TokenBatch::default);
    out.into_iter().enumerate().map(|(i, tokens)| MicroBatch { tokens, moment: i as u64 }).collect()
}
