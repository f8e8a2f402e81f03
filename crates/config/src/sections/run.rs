//! What only this program has: the plan, the mesh, threads, and the guard against broken steps.

use crate::schema::section;
use crate::value::{MapOrPath, RawMap};

/// Most threads that may be asked for: each takes a stack and a share of every sum, and no machine this is built for
/// has more.
pub const MAX_THREADS: usize = 1024;

section! {
    /// How it runs here.
    pub struct RunConfig, "run" {
        /// The plan: a map, or the path of a YAML file. Patterns of module names say what is recomputed (`recompute`), frozen or trained (`freeze`, `train`),
        /// adapted (`adapters`), stored in which type (`precision`: f32, bf16), and how exact products must be (`arithmetic`: f32, bf16x2, bf16; int8_block and
        /// int8_block_stochastic; fp8_delayed, fp8_tensorwise, fp8_blockwise, mxfp8 and fp16_block, simulated to see what they do to a model; precision.md);
        /// `phalanx plan show CONFIG` prints the result.
        pub plan: Option<MapOrPath> = None,
        /// Ranks, threads of this process, along each axis: dp_replicate, dp_shard, cp, tp, pp (`{dp_shard: 2, tp: 2}`; parallel.md). Left out: one rank.
        pub mesh: Option<RawMap> = None,
        /// Threads that compute, at most 1024. Left out: one a core. Results do not depend on it.
        pub threads: Option<usize> = None,
        /// Skip a step whose loss or gradient is not finite, and count it; `false` lets it through.
        pub nan_guard: bool = true,
        /// Stop the run after this many skipped steps in a row.
        pub max_skipped_steps: u64 = 10,
        /// Apply `weight_decay` to norms and biases as well.
        pub decay_norms_and_biases: bool = false,
        /// Record what the kernels of a few steps take: a table at the end of the run and in `profile.json`, and the trace
        /// `trace-rank0.json`, both in `output_dir`. Results do not change.
        pub profile: bool = false,
        /// Steps that `profile` records, after two that warm up.
        pub profile_steps: u64 = 3,
    }
}
