//! `phalanx doctor`

use phalanx_kernels::peak;
use phalanx_report::{System, Table};
use serde_json::json;

use crate::out;
use crate::outcome::{Outcome, Result};

pub fn run(json: bool, threads: Option<usize>) -> Result<Outcome> {
    let system = System::read();
    let rt = super::runtime(threads)?;
    let dev = rt.device();
    let fma = peak::fma_gflops(dev);
    let low = peak::low_precision_gflops(dev);
    let gemm = gemm_gflops(&rt)?;
    let (read, copy) = (peak::read_bandwidth_gbs(dev)?, peak::copy_bandwidth_gbs(dev)?);
    let threads = dev.team().threads();
    if json {
        let mut out_json = system.to_json();
        if let Some(o) = out_json.as_object_mut() {
            o.insert("version".into(), json!(env!("CARGO_PKG_VERSION")));
            o.insert("isa".into(), json!(dev.isa().to_string()));
            o.insert("measured_threads".into(), json!(threads));
            o.insert("peak_fma_gflops".into(), json!(fma));
            o.insert("peak_bf16_gflops".into(), json!(low.bf16));
            o.insert("peak_int8_gops".into(), json!(low.int8));
            o.insert("gemm_gflops".into(), json!(gemm));
            o.insert("read_bandwidth_gbs".into(), json!(read));
            o.insert("copy_bandwidth_gbs".into(), json!(copy));
        }
        out::line(out_json)?;
        return Ok(Outcome::Done);
    }
    let mut table = Table::new(super::style(), &["", ""]);
    for (what, value) in system.rows() {
        table.row([what.to_owned(), value]);
    }
    table.row(["kernels run on".into(), format!("{}, {threads} threads", dev.isa())]);
    table.row(["f32 multiply-add peak".into(), format!("{fma:.0} GFLOP/s measured")]);
    let rows = [("bf16 pairs peak", low.bf16, "GFLOP/s"), ("int8 peak", low.int8, "GOP/s")];
    for (what, rate, unit) in rows.into_iter().filter_map(|(what, rate, unit)| Some((what, rate?, unit))) {
        table.row([what.into(), format!("{rate:.0} {unit} measured ({:.1} × f32)", rate / fma)]);
    }
    table.row(["f32 GEMM 1024³".into(), format!("{gemm:.0} GFLOP/s measured ({:.0} % of peak)", 100.0 * gemm / fma)]);
    table.row(["memory read".into(), format!("{read:.1} GB/s measured")]);
    table.row(["memory copy".into(), format!("{copy:.1} GB/s measured")]);
    out::text(table)?;
    if system.huge_pages.as_deref() == Some("never") {
        out::line(
            "note: transparent huge pages are off; `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled` as root makes large products up to twice as fast",
        )?;
    }
    Ok(Outcome::Done)
}

/// Best of a few products of 1024³.
fn gemm_gflops(rt: &phalanx_tensor::Runtime) -> Result<f64> {
    use phalanx_kernels::gemm::{Gemm, gemm};
    use phalanx_tensor::{Category, DType};
    let n = 1024;
    let a = rt.zeros(&[n, n], Category::Workspace)?;
    let b = rt.zeros(&[n, n], Category::Workspace)?;
    let mut c = rt.empty(&[n, n], DType::F32, Category::Workspace)?;
    let mut best = 0f64;
    for _ in 0..8 {
        let start = std::time::Instant::now();
        gemm(rt.device(), &Gemm::nt(n, n, n, a.mat(), b.mat()), c.f32_mut()?)?;
        best = best.max(2.0 * (n as f64).powi(3) / start.elapsed().as_secs_f64() / 1e9);
    }
    Ok(best)
}
