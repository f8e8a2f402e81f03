//! Totals, idle times and peaks that are known, and theory against the simulator.

use phalanx_parallel::pipeline::{
    Durations, Schedule, ScheduleKind, Timeline, build, dual_pipe_v, ideal_efficiency, predicted, simulate, validate,
};

/// F = I = W = 1 for all layers of a rank, however many stages they are cut into.
fn time_of_shares(kind: ScheduleKind, p: usize, m: usize, chunks: Option<usize>) -> Timeline {
    let schedule = build(kind, p, m, chunks).unwrap();
    let share = Durations::of_rank_share(1.0, 1.0, 1.0, chunks.unwrap_or(1));
    simulate(&schedule, &share).unwrap()
}

fn all_idle(time: &Timeline, idle: f64) {
    for (r, rank) in time.ranks.iter().enumerate() {
        assert!((rank.idle - idle).abs() < 1e-9, "rank {r}: {} and not {idle}", rank.idle);
    }
}

#[test]
fn four_ranks_eight_micro_batches() {
    use ScheduleKind::{GPipe, Interleaved, OneForwardOneBackward, ZeroBubbleH1};
    for (kind, chunks, total, idle) in [
        (GPipe, None, 33.0, 9.0),
        (OneForwardOneBackward, None, 33.0, 9.0),
        (Interleaved, Some(2), 28.5, 4.5),
        (Interleaved, Some(4), 26.25, 2.25),
        (ZeroBubbleH1, None, 27.0, 3.0),
    ] {
        let time = time_of_shares(kind, 4, 8, chunks);
        assert_eq!(time.total, total, "{kind} {chunks:?}");
        all_idle(&time, idle);
        assert!((time.efficiency() - 24.0 / total).abs() < 1e-12);
    }
}

#[test]
fn eight_ranks_thirty_two_micro_batches() {
    use ScheduleKind::{GPipe, Interleaved, OneForwardOneBackward, ZeroBubbleH1};
    for (kind, chunks, total) in [
        (GPipe, None, 117.0),
        (OneForwardOneBackward, None, 117.0),
        (Interleaved, Some(2), 106.5),
        (Interleaved, Some(4), 101.25),
        (ZeroBubbleH1, None, 103.0),
    ] {
        let time = time_of_shares(kind, 8, 32, chunks);
        assert_eq!(time.total, total, "{kind} {chunks:?}");
        all_idle(&time, total - 96.0);
    }
}

#[test]
fn activations_that_ranks_hold() {
    use ScheduleKind::{GPipe, Interleaved, OneForwardOneBackward, ZeroBubbleH1, ZeroBubbleV};
    let peak = |kind, p, m, chunks| time_of_shares(kind, p, m, chunks).peak_activations();
    assert_eq!(peak(OneForwardOneBackward, 4, 8, None), [4.0, 3.0, 2.0, 1.0]);
    assert_eq!(peak(OneForwardOneBackward, 4, 2, None), [2.0, 2.0, 2.0, 1.0]);
    assert_eq!(peak(ZeroBubbleH1, 4, 8, None), [4.0; 4]);
    assert_eq!(peak(ZeroBubbleV, 4, 8, Some(2)), [4.0; 4]);
    assert_eq!(peak(GPipe, 4, 8, None), [8.0; 4]);
    for (p, v, first) in [(4, 2, 5.5), (4, 4, 4.75), (8, 2, 11.5), (8, 4, 9.75)] {
        let peak = peak(Interleaved, p, 4 * p, Some(v));
        assert_eq!(peak[0], first, "p{p} v{v}");
        let (pf, vf) = (p as f64, v as f64);
        assert!((first - pf * (1.0 + (pf - 1.0) / (pf * vf))).abs() < 1e-12);
        for (r, held) in peak.iter().enumerate() {
            assert_eq!(*held, (2 * (p - r - 1) + (v - 1) * p + 1) as f64 / vf, "p{p} v{v} rank {r}");
        }
    }
}

#[test]
fn dual_pipe_v_in_times_of_a_stage() {
    let unit = Durations::new(1.0, 1.0, 1.0);
    for (ranks, m, pair, split, total, idle) in [
        (4, 10, 3.0, true, 66.0, 6.0),
        (4, 10, 3.0, false, 72.0, 12.0),
        (4, 10, 2.5, true, 59.0, 4.5),
        (4, 10, 2.5, false, 65.0, 10.5),
        (8, 16, 3.0, true, 110.0, 14.0),
        (8, 16, 3.0, false, 124.0, 28.0),
    ] {
        let schedule = dual_pipe_v(ranks, m, split).unwrap();
        let time = simulate(&schedule, &unit.clone().overlapped(pair)).unwrap();
        assert_eq!(time.total, total, "R{ranks} m{m} FB {pair} split {split}");
        assert!(time.ranks.iter().all(|rank| rank.peak_stages == 2 * ranks + 1));
        // The last rank runs the most pairs, so when pairs gain something it is the one that is idle as long as the formula says.
        assert_eq!(time.most_idle(), idle, "R{ranks} m{m} FB {pair} split {split}");
        assert_eq!(time.ranks[ranks - 1].idle, idle);
        if pair == 3.0 {
            all_idle(&time, idle);
        }
    }
}

#[test]
fn zb_v_never_waits_when_f_i_and_w_are_alike() {
    for p in 1..=9 {
        for m in [2 * p - 1, 2 * p, 2 * p + 3, 5 * p] {
            let schedule = build(ScheduleKind::ZeroBubbleV, p, m, None).unwrap();
            let time = simulate(&schedule, &Durations::new(1.0, 1.0, 1.0)).unwrap();
            for rank in &time.ranks {
                assert_eq!(rank.idle_within, 0.0, "p{p} m{m}");
                assert_eq!(rank.busy, 6.0 * m as f64);
            }
            assert_eq!(time.total, (6 * m + p - 1) as f64, "p{p} m{m}");
            assert_eq!(time.peak_activations(), vec![p as f64; p], "p{p} m{m}");
        }
    }
}

#[test]
fn latency_delays_and_ideal_efficiency_leaves_it_aside() {
    let schedule = build(ScheduleKind::OneForwardOneBackward, 4, 8, None).unwrap();
    let slow = Durations::new(1.0, 1.0, 1.0).latency(0.25);
    let time = simulate(&schedule, &slow).unwrap();
    assert!(time.total > 33.0 && time.total < 40.0, "{}", time.total);
    assert!((ideal_efficiency(&schedule, &slow).unwrap() - 24.0 / 33.0).abs() < 1e-12);
    let alone = build(ScheduleKind::Interleaved, 1, 4, Some(3)).unwrap();
    assert_eq!(simulate(&alone, &slow).unwrap().efficiency(), 1.0);
}

#[test]
fn the_slowest_stage_sets_the_pace() {
    let schedule = build(ScheduleKind::OneForwardOneBackward, 4, 16, None).unwrap();
    let head = Durations::new(1.0, 1.0, 1.0).stage_scale(vec![1.0, 1.0, 1.0, 2.0]);
    let time = simulate(&schedule, &head).unwrap();
    // The last rank never waits once it has begun; the rest wait for it.
    assert_eq!(time.ranks[3].idle_within, 0.0);
    assert_eq!(time.total, 3.0 + 16.0 * 6.0 + 6.0);
    let error = |d: Durations| simulate(&schedule, &d).unwrap_err().to_string();
    assert!(error(Durations::new(1.0, 1.0, 1.0).stage_scale(vec![1.0; 3])).contains("3 scales for 4 stages"));
    assert!(error(Durations::new(f64::NAN, 1.0, 1.0)).contains("forward is NaN"));
    assert!(error(Durations::new(1.0, 1.0, 1.0).latency(-1.0)).contains("latency is -1"));
}

#[test]
fn the_order_of_dual_pipe_v_is_the_published_one() {
    let schedule = dual_pipe_v(2, 4, true).unwrap();
    let text = |r: usize| schedule.ranks[r].iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    assert_eq!(
        text(0),
        "F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 F0.3+B3.1 F3.2+B0.0 B3.2 F3.3+B0.1 B3.3 I0.2 W0.2 I0.3 W0.3"
    );
    assert_eq!(text(1), "F1.0 F2.0 F1.1 F2.1 F1.2 B2.0 F2.2+B1.0 F1.3+B2.1 F2.3+B1.1 B2.2 B1.2 I2.3 I1.3 W2.3 W1.3");
}

#[test]
fn theory_and_simulator_agree() {
    for kind in ScheduleKind::ALL {
        for p in 1..=6 {
            for m in [1, 2, p, 2 * p, 3 * p, 4 * p + 1] {
                for v in [2, 3] {
                    let chunks = kind.fixed_chunks().unwrap_or(v);
                    let Ok(schedule) = build(kind, p, m, Some(chunks)) else { continue };
                    for d in [Durations::new(1.0, 1.0, 1.0), Durations::new(1.0, 1.25, 0.75).overlapped(2.5)] {
                        agree(kind, &schedule, chunks, &d);
                    }
                }
            }
        }
    }
}

fn agree(kind: ScheduleKind, schedule: &Schedule, chunks: usize, durations: &Durations) {
    let found = validate(schedule).unwrap();
    assert!(found.fifo && found.in_micro_batch_order, "{kind}");
    let (p, m) = (schedule.num_ranks(), schedule.num_micro_batches);
    let Some(theory) = predicted(kind, p, m, chunks, durations) else { return };
    let time = simulate(schedule, durations).unwrap();
    assert!(
        (time.most_idle() - theory.idle).abs() < 1e-9,
        "{kind} p{p} m{m} v{chunks}: {} {theory:?}",
        time.most_idle()
    );
    let peaks: Vec<_> = time.ranks.iter().map(|r| r.peak_stages).collect();
    assert_eq!(peaks, theory.peak_stages, "{kind} p{p} m{m} v{chunks}");
}
