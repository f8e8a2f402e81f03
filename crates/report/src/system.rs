//! The machine and this process, as Linux tells it in `/proc` and `/sys`. Rates are measured elsewhere.
//!
//! The parsers are pure functions of the files' text. What a file does not say is `None`, never a guess.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::units;

/// What the machine has.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct System {
    /// The processor's name.
    pub cpu: Option<String>,
    /// Hardware threads this process may use (affinity and container limits included).
    pub threads: usize,
    /// Hardware threads of the machine.
    pub machine_threads: Option<usize>,
    /// Physical cores of the machine.
    pub machine_cores: Option<usize>,
    /// Instruction set extensions that matter here, of those that the processor has.
    pub features: Vec<String>,
    /// Bytes of memory of the machine.
    pub memory: Option<u64>,
    /// Bytes that are free or can be freed.
    pub memory_available: Option<u64>,
    /// Bytes that the container may use, where there is a limit.
    pub memory_limit: Option<u64>,
    /// Mode of transparent huge pages: `always`, `madvise` or `never`.
    pub huge_pages: Option<String>,
    /// Kernel name and version.
    pub kernel: Option<String>,
}

/// Extensions in the order of their age; the names are those of `/proc/cpuinfo`.
const FEATURES: &[&str] = &[
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "amx_fp16",
    "asimd",
    "asimdhp",
    "asimddp",
    "bf16",
    "i8mm",
    "sve",
    "sve2",
];

impl System {
    /// Reads the machine's description.
    pub fn read() -> System {
        let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let cpu = parse_cpuinfo(&text("/proc/cpuinfo"));
        let meminfo = text("/proc/meminfo");
        System {
            cpu: cpu.model,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            machine_threads: cpu.threads,
            machine_cores: cpu.cores,
            features: cpu.features,
            memory: parse_kib(&meminfo, "MemTotal"),
            memory_available: parse_kib(&meminfo, "MemAvailable"),
            memory_limit: parse_limit(&text("/sys/fs/cgroup/memory.max")),
            huge_pages: parse_choice(&text("/sys/kernel/mm/transparent_hugepage/enabled")),
            kernel: Some(text("/proc/sys/kernel/osrelease").trim().to_owned()).filter(|k| !k.is_empty()),
        }
    }

    /// Rows for a table: what, and what it is.
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let unknown = || "unknown".to_owned();
        let size = |n: Option<u64>| n.map_or_else(unknown, units::bytes);
        let count = |n: Option<usize>| n.map_or_else(unknown, |n| n.to_string());
        let mut rows = vec![
            ("processor", self.cpu.clone().unwrap_or_else(unknown)),
            ("usable threads", self.threads.to_string()),
            ("machine", format!("{} cores, {} threads", count(self.machine_cores), count(self.machine_threads))),
            ("instruction sets", if self.features.is_empty() { unknown() } else { self.features.join(" ") }),
            ("memory", format!("{}, {} available", size(self.memory), size(self.memory_available))),
        ];
        if let Some(limit) = self.memory_limit {
            rows.push(("memory limit", units::bytes(limit)));
        }
        rows.push(("transparent huge pages", self.huge_pages.clone().unwrap_or_else(unknown)));
        rows.push(("kernel", self.kernel.clone().unwrap_or_else(unknown)));
        rows
    }

    /// The description for `--json`.
    pub fn to_json(&self) -> Value {
        json!({
            "cpu": self.cpu,
            "threads": self.threads,
            "machine_threads": self.machine_threads,
            "machine_cores": self.machine_cores,
            "features": self.features,
            "memory_bytes": self.memory,
            "memory_available_bytes": self.memory_available,
            "memory_limit_bytes": self.memory_limit,
            "huge_pages": self.huge_pages,
            "kernel": self.kernel,
        })
    }
}

/// Memory of a process, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProcessMemory {
    /// Now (`VmRSS`).
    pub resident: u64,
    /// The most so far (`VmHWM`).
    pub peak: u64,
}

impl ProcessMemory {
    /// That of this process; zeros where the system does not say.
    pub fn read() -> ProcessMemory {
        let status = std::fs::read_to_string(Path::new("/proc/self/status")).unwrap_or_default();
        ProcessMemory {
            resident: parse_kib(&status, "VmRSS").unwrap_or(0),
            peak: parse_kib(&status, "VmHWM").unwrap_or(0),
        }
    }
}

/// Seconds since 1970, for names and stamps of files (never for anything a result depends on).
pub fn wall_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

#[derive(Debug, PartialEq, Eq)]
struct CpuInfo {
    model: Option<String>,
    threads: Option<usize>,
    cores: Option<usize>,
    features: Vec<String>,
}

/// `/proc/cpuinfo` of x86-64 and of AArch64 (which calls its flags `Features` and names no model).
fn parse_cpuinfo(text: &str) -> CpuInfo {
    let values = |key: &'static str| {
        text.lines().filter_map(|l| l.split_once(':')).filter(move |(k, _)| k.trim() == key).map(|(_, v)| v.trim())
    };
    let threads = values("processor").count();
    let mut cores: Vec<_> = values("physical id").zip(values("core id")).collect();
    cores.sort_unstable();
    cores.dedup();
    let flags: Vec<&str> = values("flags").chain(values("Features")).next().unwrap_or("").split_whitespace().collect();
    CpuInfo {
        model: values("model name").next().map(str::to_owned),
        threads: Some(threads).filter(|n| *n > 0),
        cores: Some(cores.len()).filter(|n| *n > 0),
        features: FEATURES.iter().filter(|f| flags.contains(f)).map(|f| f.to_string()).collect(),
    }
}

/// `Key:   123 kB`, in bytes.
fn parse_kib(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// A control group's limit: a number, or `max` for none.
fn parse_limit(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

/// The chosen word of `always [madvise] never`.
fn parse_choice(text: &str) -> Option<String> {
    let (_, rest) = text.split_once('[')?;
    rest.split_once(']').map(|(choice, _)| choice.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpuinfo_of_x86() {
        let core = |processor: usize, core: usize| {
            format!(
                "processor\t: {processor}\nmodel name\t: Some CPU @ 2.00GHz\nphysical id\t: 0\ncore id\t\t: {core}\n\
                 flags\t\t: fpu sse2 avx2 fma f16c avx512f avx512_fp16\n\n"
            )
        };
        let text: String = (0..4).map(|p| core(p, p / 2)).collect();
        let info = parse_cpuinfo(&text);
        assert_eq!(info.model.as_deref(), Some("Some CPU @ 2.00GHz"));
        assert_eq!((info.threads, info.cores), (Some(4), Some(2)));
        assert_eq!(info.features, ["avx2", "fma", "f16c", "avx512f", "avx512_fp16"]);
    }

    #[test]
    fn cpuinfo_of_arm_and_of_nothing() {
        let info = parse_cpuinfo("processor\t: 0\nFeatures\t: fp asimd asimddp sve\n\nprocessor\t: 1\n");
        assert_eq!((info.model, info.threads, info.cores), (None, Some(2), None));
        assert_eq!(info.features, ["asimd", "asimddp", "sve"]);
        assert_eq!(parse_cpuinfo(""), CpuInfo { model: None, threads: None, cores: None, features: vec![] });
    }

    #[test]
    fn memory_files() {
        let status = "Name:\tx\nVmHWM:\t   2048 kB\nVmRSS:\t    1024 kB\n";
        assert_eq!((parse_kib(status, "VmHWM"), parse_kib(status, "VmRSS")), (Some(2 << 20), Some(1 << 20)));
        assert_eq!(parse_kib(status, "Vm"), None);
        assert_eq!((parse_limit("max\n"), parse_limit("1073741824\n")), (None, Some(1 << 30)));
        assert_eq!(parse_choice("always [madvise] never\n").as_deref(), Some("madvise"));
        assert_eq!(parse_choice(""), None);
    }

    #[test]
    fn this_machine_can_be_read() {
        assert!(System::read().threads >= 1);
        let memory = ProcessMemory::read();
        assert!(memory.peak >= memory.resident || memory.peak == 0);
    }
}
