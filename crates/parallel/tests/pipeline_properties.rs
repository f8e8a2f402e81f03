//! What holds for every schedule of any size.

use phalanx_parallel::pipeline::{
    Action, Durations, Schedule, ScheduleKind, Sends, build, check_communication, predicted, simulate, validate,
    with_communication,
};
use proptest::prelude::*;

fn kinds() -> impl Strategy<Value = ScheduleKind> {
    prop::sample::select(ScheduleKind::ALL.to_vec())
}

/// A schedule with a number of micro-batches that it allows.
fn schedules() -> impl Strategy<Value = (ScheduleKind, Schedule, usize)> {
    (kinds(), 1..=9_usize, 1..=21_usize, 2..=4_usize).prop_map(|(kind, p, m, v)| {
        let chunks = kind.fixed_chunks().unwrap_or(v);
        let m = match kind {
            ScheduleKind::Interleaved => p * (1 + m % 4),
            ScheduleKind::DualPipeV => 2 * p + m - 1,
            _ => m,
        };
        (kind, build(kind, p, m, Some(chunks)).unwrap(), chunks)
    })
}

proptest! {
    #[test]
    fn sound_and_reproducible_to_the_bit((kind, schedule, chunks) in schedules()) {
        let found = validate(&schedule).unwrap();
        prop_assert!(found.fifo && found.in_micro_batch_order);
        let again = build(kind, schedule.num_ranks(), schedule.num_micro_batches, Some(chunks)).unwrap();
        prop_assert_eq!(&again, &schedule);
        let json = serde_json::to_string(&schedule).unwrap();
        prop_assert_eq!(serde_json::from_str::<Schedule>(&json).unwrap(), schedule);
    }

    #[test]
    fn messages_never_lock((_, schedule, _) in schedules()) {
        for sends in [Sends::Block, Sends::Buffer] {
            let full = with_communication(&schedule, sends).unwrap();
            let channels = check_communication(&full, sends).unwrap();
            check_communication(&full, Sends::Buffer).unwrap();
            let crossed = schedule.placement.rank_of_stage.windows(2).filter(|w| w[0] != w[1]).count();
            prop_assert_eq!(channels.num_messages, 2 * crossed * schedule.num_micro_batches);
            prop_assert_eq!(full.without_communication(), schedule.clone());
        }
    }

    /// Whatever actions take, the run ends, nothing overlaps on a rank, nothing begins before what it needs, and no rank is faster than
    /// its own work or than one micro-batch through all stages.
    #[test]
    fn uneven_durations(
        (_, schedule, _) in schedules(),
        times in prop::array::uniform4(0.0..3.0_f64),
        scales in prop::collection::vec(0.1..4.0_f64, 36),
    ) {
        let [f, i, w, latency] = times;
        let scales = scales[..schedule.num_stages()].to_vec();
        let durations = Durations::new(f, i, w).latency(latency / 3.0).stage_scale(scales.clone());
        let time = simulate(&schedule, &durations).unwrap();
        let (mut forward, mut grad) = (std::collections::BTreeMap::new(), std::collections::BTreeMap::new());
        for span in time.ranks.iter().flat_map(|r| &r.spans) {
            if let Some(p) = span.action.forward() { forward.insert((p.stage, p.micro_batch), (span.start, span.end)); }
            if let Some(p) = span.action.input_grad() { grad.insert((p.stage, p.micro_batch), (span.start, span.end)); }
        }
        for ((s, m), (start, _)) in &forward {
            if *s > 0 { prop_assert!(forward[&(s - 1, *m)].1 <= *start); }
        }
        for ((s, m), (start, _)) in &grad {
            if *s + 1 < schedule.num_stages() { prop_assert!(grad[&(s + 1, *m)].1 <= *start); }
            prop_assert!(forward[&(*s, *m)].1 <= *start);
        }
        for (r, rank) in time.ranks.iter().enumerate() {
            prop_assert!(rank.spans.windows(2).all(|w| w[0].end <= w[1].start));
            let work: f64 = schedule.placement.stages_of(r).iter().map(|&s| scales[s]).sum();
            let work = work * (f + i + w) * schedule.num_micro_batches as f64;
            prop_assert!((rank.busy - work).abs() < 1e-6 * (1.0 + work));
            prop_assert!(rank.idle_within <= rank.idle + 1e-9);
            prop_assert!(rank.peak_stages >= 1);
        }
        let through: f64 = scales.iter().sum::<f64>() * (f + i);
        prop_assert!(time.total + 1e-6 >= through);
    }

    #[test]
    fn formulas_hold(
        (kind, schedule, chunks) in schedules(),
        (f, i, w) in (0.5..2.0_f64, 0.5..2.0_f64, 0.1..2.0_f64),
        alike in any::<bool>(),
        pair in 2.0..3.5_f64,
    ) {
        let durations = if alike { Durations::new(f, f, f).overlapped(pair * f) } else { Durations::new(f, i, w) };
        let (p, m) = (schedule.num_ranks(), schedule.num_micro_batches);
        if let Some(theory) = predicted(kind, p, m, chunks, &durations) {
            let time = simulate(&schedule, &durations).unwrap();
            let idle = time.most_idle();
            prop_assert!((idle - theory.idle).abs() < 1e-6, "{} p{} m{}: {} {:?}", kind, p, m, idle, theory);
            let peaks: Vec<_> = time.ranks.iter().map(|r| r.peak_stages).collect();
            prop_assert_eq!(peaks, theory.peak_stages);
        }
    }

    /// Any two neighbours of a list swapped: either it is refused, or it is sound; never a panic, never an endless run.
    #[test]
    fn broken_schedules_are_refused((_, schedule, _) in schedules(), at in any::<prop::sample::Index>(), to in any::<prop::sample::Index>()) {
        let mut schedule = with_communication(&schedule, Sends::Buffer).unwrap();
        let rank = at.index(schedule.num_ranks());
        let list = &mut schedule.ranks[rank];
        let (a, b) = (at.index(list.len()), to.index(list.len()));
        list.swap(a, b);
        let _ = validate(&schedule);
        let _ = check_communication(&schedule, Sends::Buffer);
        let _ = check_communication(&schedule, Sends::Block);
        schedule.ranks[rank].remove(b);
        prop_assert!(check_communication(&schedule, Sends::Buffer).is_err());
    }

    #[test]
    fn any_text_is_an_action_or_an_error(text in "[FBIWsend_rcv0-9.+<>]{0,14}") {
        if let Ok(action) = text.parse::<Action>() {
            prop_assert_eq!(action.to_string().parse::<Action>(), Ok(action));
        }
    }
}
