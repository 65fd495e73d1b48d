//! What this computer has: memory, disk, instruction sets.

use std::path::Path;

/// Main memory in bytes, as far as this process may use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    pub total: u64,
    /// What can be had without swapping; the page cache counts as free.
    pub available: u64,
}

impl Memory {
    /// `None` where the system does not tell.
    pub fn detect() -> Option<Memory> {
        let memory = parse_meminfo(&std::fs::read_to_string("/proc/meminfo").ok()?)?;
        Some(match container_limit() {
            Some(limit) if limit < memory.total => Memory { total: limit, available: memory.available.min(limit) },
            _ => memory,
        })
    }
}

fn parse_meminfo(text: &str) -> Option<Memory> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    Some(Memory { total: field("MemTotal")?, available: field("MemAvailable")? })
}

/// The least memory limit of the control groups that this process is in.
fn container_limit() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let limits = groups.lines().filter_map(|line| {
        // hierarchy:controllers:path; version 2 has no controllers.
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            _ if controllers.split(',').any(|c| c == "memory") => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            _ => return None,
        };
        // Inside a container the path may be that of the host; then the root is the group itself.
        let path = Path::new(path.trim_start_matches('/'));
        path.ancestors().filter_map(|group| read_number(&Path::new(root).join(group).join(file))).min()
    });
    limits.min()
}

fn read_number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Bytes of all files below `folder`; links are not followed.
pub fn folder_bytes(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let bytes = entries.map(|entry| match entry.metadata() {
        Ok(data) if data.is_dir() => folder_bytes(&entry.path()),
        Ok(data) if data.is_file() => data.len(),
        _ => 0,
    });
    bytes.sum()
}

/// Marketing name of the CPU.
pub fn cpu_name() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.trim().strip_prefix(':'))?;
    Some(name.trim().to_owned())
}

/// Logical CPUs that are switched on, whether this process may use them or not.
pub fn online_cpus() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    Some(text.lines().filter(|line| line.starts_with("processor")).count()).filter(|n| *n > 0)
}

/// Instruction sets that matter to the kernels and that this CPU has.
pub fn cpu_features() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    let all = [
        ("sse4.2", is_x86_feature_detected!("sse4.2")),
        ("avx", is_x86_feature_detected!("avx")),
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avxvnni", is_x86_feature_detected!("avxvnni")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512dq", is_x86_feature_detected!("avx512dq")),
        ("avx512vl", is_x86_feature_detected!("avx512vl")),
        ("avx512vnni", is_x86_feature_detected!("avx512vnni")),
        ("avx512vbmi", is_x86_feature_detected!("avx512vbmi")),
        ("gfni", is_x86_feature_detected!("gfni")),
        ("gfni", is_x86_feature_detected!("gfni")),
    ];
    #[cfg(target_arch = "aarch64")]
    let all = [
        ("neon", std::arch::is_aarch64_feature_detected!("neon")),
        ("dotprod", std::arch::is_aarch64_feature_detected!("dotprod")),
        ("fp16", std::arch::is_aarch64_feature_detected!("fp16")),
        ("i8mm", std::arch::is_aarch64_feature_detected!("i8mm")),
        ("bf16", std::arch::is_aarch64_feature_detected!("bf16")),
        ("sve", std::arch::is_aarch64_feature_detected!("sve")),
        ("sve2", std::arch::is_aarch64_feature_detected!("sve2")),
    ];
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let all: [(&str, bool); 0] = [];
    all.into_iter().filter(|(_, has)| *has).map(|(name, _)| name).collect()
}

/// A size for people: decimal units, as disks and downloads are sold.
pub fn size(bytes: u64) -> String {
    let bytes = bytes as f64;
    if bytes >= 1e9 { format!("{:.2} GB", bytes / 1e9) } else { format!("{:.1} MB", bytes / 1e6) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read() {
        let text = "MemTotal:       24684096 kB\nMemFree:         5412732 kB\nMemAvailable:   19782940 kB\n";
        assert_eq!(parse_meminfo(text), Some(Memory { total: 24_684_096 * 1024, available: 19_782_940 * 1024 }));
        for bad in ["", "MemTotal: x kB\nMemAvailable: 1 kB", "MemTotal: 1 kB", "MemTotal: 99999999999999999999 kB"] {
            assert_eq!(parse_meminfo(bad), None, "{bad}");
        }
    }

    #[test]
    fn sizes_are_told() {
        assert_eq!((size(1_500_000).as_str(), size(2_345_000_000).as_str()), ("1.5 MB", "2.35 GB"));
    }

    #[test]
    fn folders_are_measured_without_links() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("a")).unwrap();
        std::fs::write(folder.path().join("a/x"), [0; 100]).unwrap();
        std::fs::write(folder.path().join("y"), [0; 11]).unwrap();
        #[cfg(unix)]
        std::os::unix::fs::symlink(folder.path(), folder.path().join("a/loop")).unwrap();
        assert_eq!(folder_bytes(folder.path()), 111);
        assert!(cactus::hub::cache::free_bytes(&folder.path().join("not/there")).is_none_or(|bytes| bytes > 0));
    }
}
