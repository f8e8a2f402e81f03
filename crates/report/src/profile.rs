//! A recording of kernels as a table for people, as JSON, and as a trace for Perfetto or `chrome://tracing`.
//!
//! Each time stands beside the least that the machine could have needed: a kernel that does `flops` and moves `bytes` takes at least
//! max(flops / peak, bytes / bandwidth), with peak and bandwidth measured in the same run. That time over the time it took is its
//! fraction of the roofline.

use std::io::{self, Write};

use phalanx_kernels::peak::Roofline;
use phalanx_kernels::profile::{KernelTotal, Kind, Recording, Shape, SpanTotal};
use serde_json::{Value, json};

use crate::{Style, Table};

/// Rows of kernels that a table has at most.
const MOST_ROWS: usize = 40;

/// The share of a step that all but products and attention may take: the project's bar.
const BAR: f64 = 0.15;

/// A recording, and what the machine it ran on could do at best.
#[derive(Clone, Debug)]
pub struct Profile {
    /// What was recorded.
    pub recording: Recording,
    /// The ceilings; `None` where there was no memory to measure them.
    pub roofline: Option<Roofline>,
    /// Instruction set of the kernels.
    pub isa: String,
    /// Threads of the rank.
    pub threads: usize,
}

/// A kernel of the table.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The kernel.
    pub kernel: &'static str,
    /// The shape of its calls; empty where they are not told apart.
    pub shape: String,
    /// Number of calls.
    pub calls: u64,
    /// Seconds of all calls.
    pub seconds: f64,
    /// Share of the recorded time.
    pub share: f64,
    /// Arithmetic a second, 10⁹.
    pub gflops: f64,
    /// Bytes a second, 10⁹.
    pub gbs: f64,
    /// Fraction of the roofline.
    pub fraction: Option<f64>,
}

/// Shares of the recorded time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shares {
    /// Matrix products.
    pub gemm: f64,
    /// Attention.
    pub attention: f64,
    /// All other kernels.
    pub other: f64,
    /// What no kernel took: allocation, bookkeeping, waiting for data.
    pub outside: f64,
}

fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

impl Profile {
    /// Seconds of all regions: what shares are shares of.
    pub fn recorded(&self) -> f64 {
        seconds(self.recording.regions.iter().map(|r| r.took).sum())
    }

    /// Share of the recorded time; 0 of nothing.
    fn share(&self, of: f64) -> f64 {
        let all = self.recorded();
        if all > 0.0 { of / all } else { 0.0 }
    }

    /// All kernels, the longest first. Products are told apart by their sizes; if that makes too many rows for a table (batches of
    /// ever other lengths), not by the number of tokens.
    pub fn rows(&self) -> Vec<Row> {
        let mut totals = self.recording.kernels.clone();
        if totals.len() > MOST_ROWS {
            let mut merged: Vec<KernelTotal> = vec![];
            for t in totals {
                let shape = t.shape.of_any_tokens(t.name);
                match merged.iter_mut().find(|m| m.name == t.name && m.shape == shape) {
                    Some(m) => {
                        (m.calls, m.took) = (m.calls + t.calls, m.took + t.took);
                        (m.flops, m.bytes) = (m.flops + t.flops, m.bytes + t.bytes);
                    }
                    None => merged.push(KernelTotal { shape, ..t }),
                }
            }
            totals = merged;
        }
        totals.sort_by_key(|t| std::cmp::Reverse(t.took));
        let row = |t: &KernelTotal| {
            // A clock may not see a very short call; nothing is divided by zero.
            let took = seconds(t.took.max(1));
            Row {
                kernel: t.name,
                shape: t.shape.to_string(),
                calls: t.calls,
                seconds: seconds(t.took),
                share: self.share(seconds(t.took)),
                gflops: t.flops / took / 1e9,
                gbs: t.bytes / took / 1e9,
                fraction: self.roofline.map(|r| r.seconds(t.flops, t.bytes) / took),
            }
        };
        totals.iter().map(row).collect()
    }

    /// Who took which share.
    pub fn shares(&self) -> Shares {
        let of = |wanted: &dyn Fn(&str) -> bool| {
            let took = self.recording.kernels.iter().filter(|k| wanted(k.name)).map(|k| k.took).sum();
            self.share(seconds(took))
        };
        let gemm = of(&|name| name.starts_with("gemm"));
        let attention = of(&|name| name.starts_with("attention"));
        let other = of(&|_| true) - gemm - attention;
        let any = if self.recorded() > 0.0 { 1.0 } else { 0.0 };
        Shares { gemm, attention, other: other.max(0.0), outside: (any - gemm - attention - other).max(0.0) }
    }

    /// The table for a terminal.
    pub fn render(&self, style: Style) -> String {
        let r = &self.recording;
        let regions = r.regions.iter().map(|r| format!("{} × {}", r.calls, r.name)).collect::<Vec<_>>().join(", ");
        let ceilings = match self.roofline {
            Some(l) => format!("multiply-add peak {:.0} GFLOP/s, memory {:.1} GB/s", l.gflops, l.gbs),
            None => "ceilings not measured for want of memory".to_owned(),
        };
        let mut out =
            format!("{}\n", style.bold(&format!("profile of rank {}: {regions}, {:.3} s", r.rank, self.recorded())));
        out += &format!("{} threads, {}, {ceilings}\n\n", self.threads, self.isa);
        let rows = self.rows();
        let head = ["kernel", "shape", ">calls", ">ms", ">share", ">GFLOP/s", ">GB/s", ">of roofline"];
        let mut table = Table::new(style, &head);
        for r in rows.iter().take(MOST_ROWS) {
            table.row([
                r.kernel.to_owned(),
                r.shape.clone(),
                r.calls.to_string(),
                format!("{:.1}", r.seconds * 1e3),
                percent(r.share),
                format!("{:.1}", r.gflops),
                format!("{:.1}", r.gbs),
                r.fraction.map_or("-".to_owned(), |f| format!("{f:.2}")),
            ]);
        }
        if let Some(rest) = rows.get(MOST_ROWS..).filter(|rest| !rest.is_empty()) {
            let (calls, time) = (rest.iter().map(|r| r.calls).sum::<u64>(), rest.iter().map(|r| r.seconds).sum());
            let name = format!("{} more rows", rest.len());
            table.row([
                name,
                String::new(),
                calls.to_string(),
                format!("{:.1}", time * 1e3),
                percent(self.share(time)),
            ]);
        }
        let s = self.shares();
        let line = |table: &mut Table, name: &str, share: f64| {
            let time = format!("{:.1}", share * self.recorded() * 1e3);
            table.row([name.to_owned(), String::new(), String::new(), time, percent(share)]);
        };
        line(&mut table, "not in any kernel", s.outside);
        table.row([""; 8]);
        line(&mut table, "GEMM", s.gemm);
        line(&mut table, "attention", s.attention);
        line(&mut table, "everything else", s.other + s.outside);
        out += &table.to_string();
        if r.regions.iter().any(|r| r.name == "step") {
            out += &format!("everything else may take {} of a training step\n", percent(BAR));
        }
        if !r.phases.is_empty() {
            let named = |p: &SpanTotal| format!("{} {}", p.name, percent(self.share(seconds(p.took))));
            out += &format!("phases: {}\n", r.phases.iter().map(named).collect::<Vec<_>>().join(", "));
        }
        if rows.iter().any(|r| r.fraction.is_some_and(|f| f > 1.0)) {
            out += "A fraction above 1: faster than f32 multiply-adds (tiles of AMX, operands as bf16), or than memory (operands in a cache).\n";
        }
        if r.cut > 0 {
            let kept = r.events.len();
            out += &format!("The trace holds the first {kept} spans, {} more are in the table only.\n", r.cut);
        }
        out
    }

    /// All of it but the trace, as one object.
    pub fn to_json(&self) -> Value {
        let s = self.shares();
        let span = |p: &SpanTotal| json!({"name": p.name, "calls": p.calls, "seconds": seconds(p.took), "share": self.share(seconds(p.took))});
        json!({
            "rank": self.recording.rank,
            "threads": self.threads,
            "isa": self.isa,
            "peak_gflops": self.roofline.map(|r| r.gflops),
            "memory_gbs": self.roofline.map(|r| r.gbs),
            "seconds": self.recorded(),
            "regions": self.recording.regions.iter().map(span).collect::<Vec<_>>(),
            "phases": self.recording.phases.iter().map(span).collect::<Vec<_>>(),
            "share_gemm": s.gemm,
            "share_attention": s.attention,
            "share_other_kernels": s.other,
            "share_not_in_any_kernel": s.outside,
            "share_everything_else": s.other + s.outside,
            "trace_spans": self.recording.events.len(),
            "trace_spans_cut": self.recording.cut,
            "kernels": self.rows().iter().map(Row::to_json).collect::<Vec<_>>(),
        })
    }

    /// The same as lines: one a kernel, then one with the rest. Each has the key `profile`.
    pub fn json_lines(&self) -> Vec<Value> {
        let mut whole = self.to_json();
        let mut lines = vec![];
        if let Some(Value::Array(kernels)) = whole.as_object_mut().and_then(|w| w.remove("kernels")) {
            lines = kernels;
        }
        lines.iter_mut().for_each(|line| line["profile"] = json!("kernel"));
        whole["profile"] = json!("total");
        lines.push(whole);
        lines
    }

    /// The trace in Chrome's JSON format, which Perfetto reads: the rank is the process, times are microseconds.
    ///
    /// # Errors
    /// If `out` does.
    pub fn write_trace(&self, out: &mut dyn Write) -> io::Result<()> {
        let r = &self.recording;
        let about = json!({"rank": r.rank, "isa": self.isa, "threads": self.threads, "spans_cut": r.cut});
        writeln!(out, "{{\"displayTimeUnit\": \"ms\", \"otherData\": {about}, \"traceEvents\": [")?;
        let named = json!({"name": "process_name", "ph": "M", "pid": r.rank, "tid": 0, "args": {"name": format!("rank {}", r.rank)}});
        write!(out, "{named}")?;
        for e in &r.events {
            let (category, args) = match e.kind {
                Kind::Region => ("region", json!({})),
                Kind::Phase => ("phase", json!({})),
                Kind::Scope => ("scope", json!({})),
                Kind::Kernel(cost) => {
                    let took = seconds(e.took.max(1));
                    let mut args = json!({
                        "flops": cost.flops, "bytes": cost.bytes,
                        "GFLOP/s": round(cost.flops / took / 1e9), "GB/s": round(cost.bytes / took / 1e9),
                    });
                    if cost.shape != Shape::Any {
                        args["shape"] = json!(cost.shape.to_string());
                    }
                    if let Some(l) = self.roofline {
                        args["of roofline"] = json!(round(l.seconds(cost.flops, cost.bytes) / took));
                    }
                    ("kernel", args)
                }
            };
            // Whole nanoseconds written out, so that rounding does not push a span out of what it is in.
            let us = |ns: u64| format!("{}.{:03}", ns / 1000, ns % 1000);
            write!(
                out,
                ",\n{{\"name\": {}, \"cat\": \"{category}\", \"ph\": \"X\", \"ts\": {}, \"dur\": {}, \"pid\": {}, \"tid\": {}, \"args\": {args}}}",
                json!(e.name),
                us(e.start),
                us(e.took),
                r.rank,
                e.thread
            )?;
        }
        writeln!(out, "\n]}}")
    }
}

impl Row {
    fn to_json(&self) -> Value {
        json!({
            "kernel": self.kernel, "shape": self.shape, "calls": self.calls, "seconds": self.seconds, "share": self.share,
            "gflops": self.gflops, "gbs": self.gbs, "fraction_of_roofline": self.fraction,
        })
    }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn round(x: f64) -> f64 {
    (x * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use phalanx_kernels::Device;
    use phalanx_kernels::elementwise::add;
    use phalanx_kernels::gemm::{Gemm, gemm};

    use super::*;

    /// Products with these numbers of tokens, each in a layer of a step.
    fn profile(tokens: &[usize]) -> Profile {
        let dev = Device::new(1);
        dev.profiler().start(2);
        for &t in tokens {
            let _step = dev.profiler().region("step");
            let _phase = dev.profiler().phase("forward");
            let _layer = dev.profiler().scope(|| "model.layers.0 \"quoted\"".into());
            let (x, w, mut y) = (vec![1f32; t * 8], vec![1f32; 64], vec![0f32; t * 8]);
            gemm(&dev, &Gemm::nt(t, 8, 8, x[..].into(), w[..].into()), &mut y).unwrap();
            gemm(&dev, &Gemm::tn(8, 8, t, x[..].into(), x[..].into()), &mut vec![0f32; 64]).unwrap();
            let sum = y.clone();
            add(&dev, &x, &sum, &mut y).unwrap();
        }
        let recording = dev.profiler().stop().unwrap();
        let roofline = Some(Roofline { gflops: 100.0, gbs: 10.0 });
        Profile { recording, roofline, isa: "any".into(), threads: 1 }
    }

    #[test]
    fn shares_are_of_the_whole_and_rows_fall_in_time() {
        let p = profile(&[64, 64, 32]);
        let rows = p.rows();
        assert_eq!(rows.len(), 5);
        assert!(rows.windows(2).all(|w| w[0].seconds >= w[1].seconds));
        let sum: f64 = rows.iter().map(|r| r.share).sum();
        let s = p.shares();
        assert!(sum > 0.0 && sum <= 1.0, "{sum}");
        assert!((s.gemm + s.attention + s.other + s.outside - 1.0).abs() < 1e-9, "{s:?}");
        assert!(s.gemm > 0.0 && s.attention == 0.0 && s.other > 0.0);
        let r = rows.iter().find(|r| r.kernel == "gemm forward" && r.shape == "64x8x8 f32").unwrap();
        assert_eq!(r.calls, 2);
        // 2·64·8·8 at 100 GFLOP/s are 82 ns; (2·64·8 + 64)·4 bytes at 10 GB/s are 435 ns: memory is the ceiling.
        let expected = 2.0 * 4352.0 / 10e9 / r.seconds;
        assert!((r.fraction.unwrap() / expected - 1.0).abs() < 1e-6, "{r:?}");
    }

    #[test]
    fn batches_of_ever_other_lengths_become_one_row_a_layer() {
        let p = profile(&(1..=60).collect::<Vec<_>>());
        let mut rows: Vec<_> = p.rows().into_iter().map(|r| (r.kernel, r.shape, r.calls)).collect();
        rows.sort_unstable();
        let expected = [("add", "", 60), ("gemm forward", "*x8x8 f32", 60), ("gemm wgrad", "8x8x* f32", 60)];
        assert_eq!(rows, expected.map(|(k, s, n)| (k, s.to_owned(), n)));
    }

    #[test]
    fn the_table_and_the_lines_say_the_same() {
        let p = profile(&[64]);
        let text = p.render(Style::new(false));
        for part in ["profile of rank 2: 1 × step", "100 GFLOP/s", "64x8x8 f32", "not in any kernel", "everything else"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(text.contains("phases: forward ") && !text.contains("more are in the table"), "{text}");
        let lines = p.json_lines();
        assert_eq!(lines.len(), 4);
        assert!(lines[..3].iter().all(|l| l["profile"] == "kernel" && l["calls"] == 1));
        assert_eq!((&lines[3]["profile"], &lines[3]["rank"]), (&json!("total"), &json!(2)));
        assert_eq!(p.to_json()["kernels"].as_array().unwrap().len(), 3);
    }

    #[test]
    fn nothing_recorded_is_no_division_by_zero() {
        let p = Profile { recording: Recording::default(), roofline: None, isa: "any".into(), threads: 1 };
        assert!(p.rows().is_empty() && !p.render(Style::new(false)).contains("NaN"));
        assert_eq!(p.to_json()["share_everything_else"], json!(0.0));
    }

    #[test]
    fn the_trace_is_json_and_its_spans_nest() {
        let p = profile(&[16, 16]);
        let mut text = vec![];
        p.write_trace(&mut text).unwrap();
        let trace: Value = serde_json::from_slice(&text).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        assert_eq!((&events[0]["ph"], &events[0]["args"]["name"]), (&json!("M"), &json!("rank 2")));
        let spans = &events[1..];
        assert_eq!(spans.len(), 12);
        // Microseconds with three digits after the point are whole nanoseconds.
        let ns = |v: &Value| (v.as_f64().unwrap() * 1000.0).round() as u64;
        let (mut ends, mut last): (Vec<u64>, u64) = (vec![], 0);
        for s in spans {
            let (start, end) = (ns(&s["ts"]), ns(&s["ts"]) + ns(&s["dur"]));
            assert!(s["ph"] == "X" && s["pid"] == 2 && start >= last);
            last = start;
            while ends.last().is_some_and(|&e| e <= start) {
                ends.pop();
            }
            assert!(ends.last().is_none_or(|&e| end <= e), "{s}");
            ends.push(end);
        }
        assert!(spans.iter().any(|s| s["name"] == "model.layers.0 \"quoted\"" && s["cat"] == "scope"));
        assert!(spans.iter().any(|s| s["args"]["shape"] == "16x8x8 f32" && s["args"]["flops"] == 2048.0));
    }
}
