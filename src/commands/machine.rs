//! What this computer has: memory, disk, instruction sets, sensors.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Where Linux tells about devices.
const SYS: &str = "/sys";

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

/// Memory of this process that is in main memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    /// The most so far.
    pub peak: u64,
    pub now: u64,
}

impl Resident {
    /// `None` where the system does not tell.
    pub fn read() -> Option<Resident> {
        parse_resident(&std::fs::read_to_string("/proc/self/status").ok()?)
    }

    /// Lets the peak begin anew, where the system can do that.
    pub fn forget_peak() {
        // 5 resets VmHWM: <https://docs.kernel.org/filesystems/proc.html>, 3.1 on clear_refs.
        let _ = std::fs::write("/proc/self/clear_refs", "5");
    }
}

fn parse_resident(status: &str) -> Option<Resident> {
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    Some(Resident { peak: field("VmHWM:")?, now: field("VmRSS:")? })
}

/// What may slow a CPU down, at one moment. `None` where the system does not tell.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sensors {
    /// Degrees Celsius by the name of the sensor.
    pub temperatures_c: Option<BTreeMap<String, f64>>,
    /// How often cores were slowed down for their heat since the machine was started, all cores together.
    pub throttle_count: Option<u64>,
    /// Frequency of the fastest core.
    pub frequency_mhz: Option<f64>,
}

impl Sensors {
    pub fn read() -> Sensors {
        Self::below(Path::new(SYS))
    }

    fn below(sys: &Path) -> Sensors {
        let mut temperatures = BTreeMap::new();
        for zone in folders(&sys.join("class/thermal"), "thermal_zone") {
            // In thousandths of a degree; sensors that are off tell nonsense such as -274.
            let celsius = read_text(&zone.join("temp")).and_then(|text| text.parse::<f64>().ok()).map(|milli| milli / 1e3);
            let Some(celsius) = celsius.filter(|celsius| (-50.0..=200.0).contains(celsius)) else { continue };
            let place = zone.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
            let mut name = read_text(&zone.join("type")).unwrap_or_else(|| place.clone());
            if temperatures.contains_key(&name) {
                name = format!("{name} {place}");
            }
            temperatures.insert(name, celsius);
        }
        let cpus = folders(&sys.join("devices/system/cpu"), "cpu");
        let counts: Vec<u64> =
            cpus.iter().filter_map(|cpu| read_number(&cpu.join("thermal_throttle/core_throttle_count"))).collect();
        let fastest = cpus.iter().filter_map(|cpu| read_number(&cpu.join("cpufreq/scaling_cur_freq"))).max();
        Sensors {
            temperatures_c: (!temperatures.is_empty()).then_some(temperatures),
            throttle_count: (!counts.is_empty()).then(|| counts.iter().fold(0u64, |sum, count| sum.saturating_add(*count))),
            frequency_mhz: fastest.map(|khz| khz as f64 / 1e3),
        }
    }

    /// The highest temperature.
    pub fn hottest_c(&self) -> Option<f64> {
        self.temperatures_c.as_ref()?.values().copied().max_by(f64::total_cmp)
    }
}

/// How the system chooses frequencies, such as `performance`; several names where cores differ.
pub fn governor() -> Option<String> {
    let cpus = folders(&Path::new(SYS).join("devices/system/cpu"), "cpu");
    let mut names: Vec<String> = cpus.iter().filter_map(|cpu| read_text(&cpu.join("cpufreq/scaling_governor"))).collect();
    names.sort();
    names.dedup();
    (!names.is_empty()).then(|| names.join(", "))
}

/// Bytes of the largest cache of the first CPU.
pub fn last_level_cache() -> Option<u64> {
    let caches = folders(&Path::new(SYS).join("devices/system/cpu/cpu0/cache"), "index");
    caches.iter().filter_map(|cache| parse_cache(&read_text(&cache.join("size"))?)).max()
}

/// Such as `32768K`.
fn parse_cache(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

/// Folders in `parent` that are called `name` and a number, in no order.
pub fn folders(parent: &Path, name: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    let numbered = entries.filter(|entry| {
        let number = entry.file_name().to_string_lossy().strip_prefix(name).map(str::to_owned);
        number.is_some_and(|number| !number.is_empty() && number.chars().all(|c| c.is_ascii_digit()))
    });
    numbered.map(|entry| entry.path()).collect()
}

fn read_text(path: &Path) -> Option<String> {
    Some(std::fs::read_to_string(path).ok()?.trim().to_owned()).filter(|text| !text.is_empty())
}

/// The number that a file holds.
pub fn read_number(path: &Path) -> Option<u64> {
    read_text(path)?.parse().ok()
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
    fn resident_memory_is_read() {
        let status = "Name:\tcactus\nVmHWM:\t   20480 kB\nVmRSS:\t   10240 kB\n";
        assert_eq!(parse_resident(status), Some(Resident { peak: 20480 * 1024, now: 10240 * 1024 }));
        assert_eq!(parse_resident("VmHWM: 1 kB"), None);
        assert_eq!(
            [parse_cache("48K"), parse_cache("32M"), parse_cache("x"), parse_cache("")],
            [Some(49152), Some(33554432), None, None]
        );
    }

    #[test]
    fn sensors_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        assert_eq!(Sensors::below(folder.path()), Sensors::default());
        for (zone, kind, temp) in [("0", "cpu-0\n", "45500\n"), ("1", "cpu-0\n", "61000\n"), ("2", "off\n", "-274000\n")] {
            write(&format!("class/thermal/thermal_zone{zone}/type"), kind);
            write(&format!("class/thermal/thermal_zone{zone}/temp"), temp);
        }
        write("devices/system/cpu/cpu0/thermal_throttle/core_throttle_count", "3\n");
        write("devices/system/cpu/cpu1/thermal_throttle/core_throttle_count", "4\n");
        write("devices/system/cpu/cpu1/cpufreq/scaling_cur_freq", "2500000\n");
        write("devices/system/cpu/cpufreq/scaling_cur_freq", "9900000\n");
        let sensors = Sensors::below(folder.path());
        assert_eq!((sensors.throttle_count, sensors.frequency_mhz, sensors.hottest_c()), (Some(7), Some(2500.0), Some(61.0)));
        assert_eq!(sensors.temperatures_c.unwrap().len(), 2);
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
