//! Delayed scales of a linear layer, held between steps.

use std::sync::{Mutex, MutexGuard};

use phalanx_kernels::lowp::{AmaxHistory, Delayed, Operand, Recipe};

/// The scales that a linear layer's operands are rounded with, from their magnitudes in earlier steps.
///
/// A scale stays the same during a whole step, however often forward runs in it (micro-batches, recompute): what is seen meanwhile waits,
/// and enters the history as one magnitude when the step is committed.
#[derive(Debug)]
pub struct LayerScales(Mutex<[Track; 3]>);

/// One operand.
#[derive(Debug)]
struct Track {
    history: AmaxHistory,
    /// The greatest magnitude seen since the last step; `None` if the operand was not seen at all.
    pending: Option<f32>,
}

impl LayerScales {
    /// Empty histories.
    pub fn new(settings: Delayed) -> LayerScales {
        let empty = |operand| AmaxHistory::new(Recipe::Fp8Delayed.spec(operand).element, settings);
        LayerScales(Mutex::new(Operand::ALL.map(|operand| Track { history: empty(operand), pending: None })))
    }

    /// The scale of this step; `None` in the first one, which goes by the operand's own magnitude.
    pub fn scale(&self, operand: Operand) -> Option<f32> {
        self.tracks()[operand as usize].history.scale()
    }

    /// Notes a magnitude of this step. Of several the greatest counts.
    pub fn see(&self, operand: Operand, amax: f32) {
        let pending = &mut self.tracks()[operand as usize].pending;
        *pending = Some(pending.map_or(amax, |before| before.max(amax)));
    }

    /// Ends a step: what was seen enters the histories, and scales are renewed. Ranks that share the layer must first see each other's
    /// magnitudes.
    pub fn commit(&self) {
        for track in self.tracks().iter_mut() {
            if let Some(amax) = track.pending.take() {
                track.history.record(amax);
            }
        }
    }

    /// Ends a step that made no update: what was seen is forgotten, and scales stay.
    pub fn discard(&self) {
        self.tracks().iter_mut().for_each(|track| track.pending = None);
    }

    /// An operand's history as it stands, for a checkpoint.
    pub fn history(&self, operand: Operand) -> AmaxHistory {
        self.tracks()[operand as usize].history.clone()
    }

    /// Puts back an operand's magnitudes, oldest first, and its scale.
    pub fn restore(&self, operand: Operand, amaxes: &[f32], scale: Option<f32>) {
        let track = &mut self.tracks()[operand as usize];
        let element = Recipe::Fp8Delayed.spec(operand).element;
        track.history = AmaxHistory::restore(element, track.history.settings(), amaxes, scale);
        track.pending = None;
    }

    fn tracks(&self) -> MutexGuard<'_, [Track; 3]> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_records_the_greatest_of_what_it_saw_once() {
        let scales = LayerScales::new(Delayed::default());
        let amaxes = |o| scales.history(o).amaxes().collect::<Vec<f32>>();
        for amax in [3.0, 7.0, 5.0] {
            scales.see(Operand::Activation, amax);
            assert_eq!(scales.scale(Operand::Activation), None, "nothing moves within a step");
        }
        scales.see(Operand::Gradient, 2.0);
        scales.commit();
        scales.commit();
        assert_eq!((amaxes(Operand::Activation), amaxes(Operand::Weight)), (vec![7.0], vec![]));
        assert_eq!(scales.scale(Operand::Activation), Some(7.0 / 448.0));
        assert_eq!(scales.scale(Operand::Gradient), Some(2.0 / 57344.0));
        scales.see(Operand::Activation, 100.0);
        scales.discard();
        scales.commit();
        assert_eq!(amaxes(Operand::Activation), [7.0]);
        let other = LayerScales::new(Delayed::default());
        other.restore(Operand::Activation, &[7.0], scales.scale(Operand::Activation));
        assert_eq!(other.history(Operand::Activation), scales.history(Operand::Activation));
    }
}
