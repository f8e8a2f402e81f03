//! The greatest magnitude of a tensor, and scales from those of earlier steps (delayed scaling, as in Transformer Engine).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};

use half::bf16;

use super::Element;
use super::scaling::{Seen, any_amax};
use super::wide::{self, Loop};
use crate::par::{PIECE, piece};
use crate::{Device, Mat};

/// The greatest finite |x|, 0 if there is none. NaN and infinities are passed over.
pub fn amax(dev: &Device, x: &[f32]) -> f32 {
    f32::from_bits(seen_in(dev, x).finite)
}

/// As [`amax`], of values of either type.
pub fn amax_of(dev: &Device, x: &Mat<'_>) -> f32 {
    let x = match x {
        Mat::F32(x) => return amax(dev, x),
        Mat::Bf16(x) => *x,
    };
    let greatest = AtomicU32::new(0);
    dev.team().run(x.len().div_ceil(PIECE), &|i, _| {
        // Without the sign, bits of finite numbers rise with their magnitude and end where infinity begins.
        let magnitudes = x[piece(i, PIECE, x.len())].iter().map(|x| x.to_bits() & 0x7fff);
        let here = magnitudes.filter(|&m| m < bf16::INFINITY.to_bits()).max().unwrap_or(0);
        greatest.fetch_max(here.into(), Ordering::Relaxed);
    });
    f32::from_bits(greatest.into_inner() << 16)
}

/// What is in `x`. A maximum is the same in any order, so tasks may report as they finish.
pub(crate) fn seen_in(dev: &Device, x: &[f32]) -> Seen {
    let (finite, any) = (AtomicU32::new(0), AtomicU32::new(0));
    dev.team().run(x.len().div_ceil(PIECE), &|i, _| {
        let mut seen = Seen::default();
        wide::run(dev.isa(), Look { x: &x[piece(i, PIECE, x.len())], seen: &mut seen });
        finite.fetch_max(seen.finite, Ordering::Relaxed);
        any.fetch_max(seen.any, Ordering::Relaxed);
    });
    Seen { finite: finite.into_inner(), any: any.into_inner() }
}

struct Look<'a> {
    x: &'a [f32],
    seen: &'a mut Seen,
}

impl Loop for Look<'_> {
    #[inline(always)]
    fn run(self) {
        *self.seen = Seen::new(any_amax(self.x), [self.x].into_iter());
    }
}

/// Which of the recorded magnitudes counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AmaxChoice {
    /// The greatest of all that are kept.
    #[default]
    Max,
    /// The last one.
    MostRecent,
}

/// Settings of delayed scaling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delayed {
    /// Steps that are remembered, at least 1. Transformer Engine's default, 1024.
    pub len: usize,
    /// Powers of two left free above the recorded magnitude (0). More room for growth, fewer bits for small values.
    pub margin: i32,
    /// Which of them counts (the greatest).
    pub choice: AmaxChoice,
}

impl Default for Delayed {
    fn default() -> Self {
        Delayed { len: 1024, margin: 0, choice: AmaxChoice::Max }
    }
}

/// The magnitudes of one tensor in earlier steps, and the scale that follows from them.
///
/// One for each operand of each layer. A step asks for [`AmaxHistory::scale`], quantises with
/// [`Scaling::Fixed`](super::Scaling::Fixed) of it (in the first step, where there is none, with the tensor's own amax), and
/// records this step's [`amax`], which ranks that share the tensor must first reduce to their greatest. Part of a checkpoint:
/// [`AmaxHistory::amaxes`] and [`AmaxHistory::scale`] out, [`AmaxHistory::restore`] in.
#[derive(Clone, Debug, PartialEq)]
pub struct AmaxHistory {
    element: Element,
    settings: Delayed,
    /// Oldest first, at most `settings.len`.
    amaxes: VecDeque<f32>,
    scale: Option<f32>,
}

impl AmaxHistory {
    /// An empty history of a tensor that is stored as `element`.
    pub fn new(element: Element, settings: Delayed) -> AmaxHistory {
        AmaxHistory { element, settings, amaxes: VecDeque::new(), scale: None }
    }

    /// A history as it was saved: the magnitudes, oldest first, and the scale. If there are more than `settings.len`, the last
    /// ones are kept.
    pub fn restore(element: Element, settings: Delayed, amaxes: &[f32], scale: Option<f32>) -> AmaxHistory {
        let kept = &amaxes[amaxes.len().saturating_sub(settings.len.max(1))..];
        AmaxHistory { element, settings, amaxes: kept.iter().copied().collect(), scale }
    }

    /// Adds a step's magnitude and renews the scale: chosen amax · 2^margin / [`Element::target`], the reciprocal of
    /// Transformer Engine's factor. A step whose magnitude is 0 or not finite is remembered as 0 and, if nothing else is
    /// known, leaves the scale as it was.
    pub fn record(&mut self, amax: f32) {
        if self.amaxes.len() >= self.settings.len.max(1) {
            self.amaxes.pop_front();
        }
        self.amaxes.push_back(if amax.is_finite() { amax.abs() } else { 0.0 });
        let chosen = match self.settings.choice {
            AmaxChoice::Max => self.amaxes.iter().copied().fold(0.0, f32::max),
            AmaxChoice::MostRecent => self.amaxes.back().copied().unwrap_or(0.0),
        };
        if chosen > 0.0 {
            // In f64, so that the margin can neither overflow nor underflow on the way.
            let scale = f64::from(chosen) / f64::from(self.element.target()) * 2f64.powi(self.settings.margin);
            self.scale = Some((scale as f32).clamp(f32::MIN_POSITIVE, f32::MAX));
        }
    }

    /// The scale for the coming step; `None` as long as nothing above 0 was recorded.
    pub fn scale(&self) -> Option<f32> {
        self.scale
    }

    /// The recorded magnitudes, oldest first.
    pub fn amaxes(&self) -> impl ExactSizeIterator<Item = f32> + '_ {
        self.amaxes.iter().copied()
    }

    /// The settings.
    pub fn settings(&self) -> Delayed {
        self.settings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scale_follows_the_greatest_or_the_last() {
        let settings = Delayed { len: 3, margin: 1, choice: AmaxChoice::Max };
        let mut max = AmaxHistory::new(Element::E4M3, settings);
        let mut last = AmaxHistory::new(Element::E4M3, Delayed { choice: AmaxChoice::MostRecent, ..settings });
        assert_eq!((max.scale(), last.scale()), (None, None));
        // 0 and NaN change nothing by themselves; after three steps the 8 is forgotten.
        let steps = [(0.0, None, None), (8.0, Some(8.0), Some(8.0)), (2.0, Some(8.0), Some(2.0))]
            .into_iter()
            .chain([(f32::NAN, Some(8.0), Some(2.0)), (1.0, Some(2.0), Some(1.0)), (4.0, Some(4.0), Some(4.0))])
            .chain([(0.0, Some(4.0), Some(4.0)), (0.0, Some(4.0), Some(4.0)), (0.0, Some(4.0), Some(4.0))])
            .chain([(0.0, Some(4.0), Some(4.0)), (f32::INFINITY, Some(4.0), Some(4.0))]);
        for (i, (amax, of_max, of_last)) in steps.enumerate() {
            max.record(amax);
            last.record(amax);
            let scale = |amax: Option<f32>| amax.map(|a| a * 2.0 / 448.0);
            assert_eq!((max.scale(), last.scale()), (scale(of_max), scale(of_last)), "step {i}");
            assert!(max.amaxes().len() <= 3);
            let saved: Vec<f32> = max.amaxes().collect();
            assert_eq!(AmaxHistory::restore(Element::E4M3, settings, &saved, max.scale()), max);
        }
    }

    #[test]
    fn magnitudes_of_either_type_pass_over_what_is_not_finite() {
        let dev = Device::new(2);
        let mut x: Vec<f32> = (0..100_000).map(|i| (i % 977) as f32 - 976.5).collect();
        (x[5], x[6], x[99_999], x[70_000]) = (f32::NAN, f32::NEG_INFINITY, f32::INFINITY, -3e8);
        let low: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
        assert_eq!(amax_of(&dev, &Mat::F32(&x)), 3e8);
        assert_eq!(amax_of(&dev, &Mat::Bf16(&low)), bf16::from_f32(3e8).to_f32());
        assert_eq!(amax_of(&dev, &Mat::Bf16(&[])), 0.0);
        assert_eq!(amax_of(&dev, &Mat::Bf16(&[bf16::NAN, bf16::NEG_INFINITY])), 0.0);
    }

    #[test]
    fn scales_stay_usable() {
        for margin in [-300, 300] {
            let mut h = AmaxHistory::new(Element::E5M2, Delayed { margin, ..Delayed::default() });
            for amax in [f32::MIN_POSITIVE, f32::MAX] {
                h.record(amax);
                assert!(h.scale().is_some_and(|s| s.is_normal() && s > 0.0));
            }
        }
    }
}
