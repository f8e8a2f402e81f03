use super::*;
use crate::gemm::{Gemm, gemm};
use crate::{Device, elementwise};

fn cost(flops: f64) -> Cost {
    Cost { flops, bytes: 8.0, shape: Shape::Any }
}

#[test]
fn off_it_records_nothing_and_counts_no_costs() {
    let p = Profiler::default();
    let span = p.kernel("add", || unreachable!("costs are not counted"));
    assert!(!span.is_recorded() && !p.scope(|| unreachable!()).is_recorded());
    assert_eq!(p.stop(), None);
    p.start(3);
    let r = p.stop().unwrap();
    assert!((r.rank, r.events.len(), r.kernels.len()) == (3, 0, 0));
    assert!(!p.is_on() && p.stop().is_none());
}

#[test]
fn kernels_in_kernels_and_outside_regions_are_not_counted_twice() {
    let p = Profiler::default();
    p.start(0);
    drop(p.kernel("outside", || cost(1.0)));
    p.pause();
    drop(p.kernel("paused", || unreachable!()));
    p.0.on.store(true, Ordering::Relaxed);
    {
        let _step = p.region("step");
        let _inner_region = p.region("step");
        let _phase = p.phase("forward");
        let _part = p.phase("part of forward");
        for _ in 0..2 {
            let _outer = p.kernel("outer", || cost(10.0));
            let _inner = p.kernel("inner", || cost(7.0));
        }
    }
    let r = p.stop().unwrap();
    assert_eq!(r.kernels.len(), 1);
    let k = &r.kernels[0];
    assert_eq!((k.name, k.calls, k.flops, k.bytes), ("outer", 2, 20.0, 16.0));
    assert_eq!((r.regions.len(), r.regions[0].calls), (1, 1));
    assert_eq!((r.phases.len(), r.phases[0].name.as_ref()), (1, "forward"));
    assert!(k.took <= r.phases[0].took && r.phases[0].took <= r.regions[0].took);
    assert_eq!(r.events.len(), 9);
}

#[test]
fn spans_of_a_thread_nest_and_start_in_order() {
    let dev = Device::new(2);
    dev.profiler().start(0);
    let work = |name: &'static str| {
        let _region = dev.profiler().region(name);
        let (a, mut c) = (vec![1f32; 64 * 64], vec![0f32; 64 * 64]);
        for _ in 0..20 {
            let _scope = dev.profiler().scope(|| "layer".into());
            gemm(&dev, &Gemm::nt(64, 64, 64, a[..].into(), a[..].into()), &mut c).unwrap();
            elementwise::add_assign(&dev, &mut c, &a, 1.0).unwrap();
        }
    };
    std::thread::scope(|s| {
        s.spawn(|| work("one"));
        s.spawn(|| work("two"));
    });
    let r = dev.profiler().stop().unwrap();
    assert_eq!(r.kernels.iter().map(|k| k.calls).sum::<u64>(), 80);
    assert_eq!(r.kernels.iter().map(|k| k.flops).sum::<f64>(), 40.0 * (2.0 * 64.0f64.powi(3) + 2.0 * 4096.0));
    for thread in 0..2 {
        let mut ends = vec![];
        let mut last = 0;
        for e in r.events.iter().filter(|e| e.thread == thread) {
            assert!(e.start >= last);
            last = e.start;
            while ends.last().is_some_and(|&end| end <= e.start) {
                ends.pop();
            }
            assert!(ends.last().is_none_or(|&end| e.start + e.took <= end), "{e:?} outlives what it is in");
            ends.push(e.start + e.took);
        }
    }
}

#[test]
fn a_long_recording_is_cut_and_its_totals_are_not() {
    let p = Profiler::default();
    p.start(0);
    let step = p.region("step");
    for _ in 0..MOST_EVENTS + 10 {
        drop(p.kernel("add", || cost(1.0)));
    }
    drop(step);
    let r = p.stop().unwrap();
    assert_eq!((r.events.len(), r.cut, r.kernels[0].calls), (MOST_EVENTS, 11, MOST_EVENTS as u64 + 10));
}

#[test]
fn spans_of_an_earlier_recording_change_nothing_and_open_ones_end() {
    let p = Profiler::default();
    p.start(0);
    let old = p.region("old");
    p.start(0);
    let open = p.region("new");
    drop(old);
    let r = p.stop().unwrap();
    drop(open);
    assert_eq!((r.regions.len(), r.regions[0].name.as_ref()), (1, "new"));
}

#[test]
fn shapes_read_well() {
    let shape = Shape::Product { m: Some(2), n: 3, k: Some(4), bf16: (false, true), arithmetic: Arithmetic::Bf16x2 };
    assert_eq!(shape.to_string(), "2x3x4 f32·bf16 as bf16x2");
    assert_eq!(shape.of_any_tokens(FORWARD).to_string(), "*x3x4 f32·bf16 as bf16x2");
    assert_eq!(shape.of_any_tokens(WGRAD).to_string(), "2x3x* f32·bf16 as bf16x2");
}
