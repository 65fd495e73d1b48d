//! How many threads suit this machine: one for each fast physical core that this process may use.
//!
//! The second hardware thread of a core shares the vector units that the kernels fill, and a slow core makes
//! all others wait at the barrier after every step, so neither is used by default. Linux says in `/sys` which
//! logical CPUs share a core and how fast each is
//! (<https://www.kernel.org/doc/html/latest/admin-guide/cputopology.html>,
//! <https://docs.kernel.org/scheduler/sched-capacity.html>); elsewhere every CPU counts as a core.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

/// Highest CPU number that is believed.
const MAX_CPU: usize = 1 << 16;
/// A core counts as fast from this share of the fastest one's capacity on. Middle cores of three-tier ARM
/// chips have 60 to 90 %, little ones 25 to 52 %.
const FAST_CAPACITY: f64 = 0.55;
/// The same for highest frequencies, which tell less: favoured cores run a few per cent above their equals,
/// dense or efficient cores stay below 70 %.
const FAST_FREQUENCY: f64 = 0.8;

/// The CPUs that this process may run on, counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Topology {
    /// CPUs' worth of time: the affinity mask, or the container's quota if that is less.
    pub parallelism: usize,
    /// Logical CPUs in the affinity mask.
    pub logical: usize,
    /// Physical cores among them.
    pub cores: usize,
    /// Those of them that are about as fast as the fastest.
    pub fast: usize,
}

impl Topology {
    /// Looks at this machine.
    pub fn detect() -> Self {
        let parallelism = std::thread::available_parallelism().map_or(1, |n| n.get());
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        let allowed = allowed.and_then(parse_list).unwrap_or_default();
        Self::read(Path::new("/sys/devices"), &allowed, parallelism)
    }

    /// Reads the tree below `devices` for the CPUs `allowed`; without one, or where the tree says nothing, every
    /// CPU of `parallelism` is a fast core.
    fn read(devices: &Path, allowed: &BTreeSet<usize>, parallelism: usize) -> Self {
        let text = |path: String| std::fs::read_to_string(devices.join(path)).ok();
        let siblings = |cpu: usize| {
            let file = |name: &str| text(format!("system/cpu/cpu{cpu}/topology/{name}"));
            file("core_cpus_list").or_else(|| file("thread_siblings_list")).and_then(|list| parse_list(&list))
        };
        let mut cores = Vec::new();
        let mut seen = BTreeSet::new();
        for &cpu in allowed {
            if seen.insert(cpu) {
                seen.extend(siblings(cpu).unwrap_or_default());
                cores.push(cpu);
            }
        }
        if cores.is_empty() {
            return Topology { parallelism, logical: parallelism, cores: parallelism, fast: parallelism };
        }
        let number = |cpu: usize, file: &str| text(format!("system/cpu/cpu{cpu}/{file}"))?.trim().parse::<f64>().ok();
        let fast = performance_cores(&cores, text("cpu_core/cpus".to_owned()).as_deref())
            .or_else(|| above(&cores, FAST_CAPACITY, &|cpu| number(cpu, "cpu_capacity")))
            .or_else(|| above(&cores, FAST_FREQUENCY, &|cpu| number(cpu, "cpufreq/cpuinfo_max_freq")))
            .unwrap_or(cores.len());
        Topology { parallelism, logical: allowed.len(), cores: cores.len(), fast }
    }

    /// Threads to use when nobody says otherwise.
    pub fn threads(&self) -> usize {
        self.fast.min(self.parallelism).max(1)
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
        write!(f, "{} on {}", count(self.logical, "CPU"), count(self.cores, "core"))?;
        if self.fast < self.cores {
            write!(f, ", {} of them fast", self.fast)?;
        }
        if self.parallelism < self.logical {
            write!(f, ", quota of {}", self.parallelism)?;
        }
        Ok(())
    }
}

/// How many of `cores` are in the list of performance cores that Linux keeps for hybrid Intel CPUs.
fn performance_cores(cores: &[usize], list: Option<&str>) -> Option<usize> {
    let list = parse_list(list?)?;
    Some(cores.iter().filter(|cpu| list.contains(cpu)).count()).filter(|n| *n > 0)
}

/// How many of `cores` have at least `share` of the greatest `power`; `None` if it is not known of all.
fn above(cores: &[usize], share: f64, power: &dyn Fn(usize) -> Option<f64>) -> Option<usize> {
    let powers: Vec<f64> = cores.iter().map(|cpu| power(*cpu)).collect::<Option<_>>()?;
    let limit = powers.iter().fold(0.0, |a: f64, b| a.max(*b)) * share;
    Some(powers.iter().filter(|p| **p >= limit).count())
}

/// CPU numbers in the kernel's list form: `0-3,8,10-11`.
fn parse_list(text: &str) -> Option<BTreeSet<usize>> {
    let mut cpus = BTreeSet::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if last > MAX_CPU {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One logical CPU of a pretended machine.
    #[derive(Clone, Copy, Default)]
    struct Cpu {
        core: usize,
        capacity: Option<u32>,
        khz: Option<u32>,
    }

    /// Writes `/sys/devices` of a machine and reads it, for the CPUs `allowed` and a quota.
    fn read(cpus: &[Cpu], performance: Option<&str>, allowed: &str, quota: usize) -> Topology {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: String, text: String| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text + "\n").unwrap();
        };
        for (id, cpu) in cpus.iter().enumerate() {
            let siblings: Vec<String> = (0..cpus.len()).filter(|i| cpus[*i].core == cpu.core).map(|i| i.to_string()).collect();
            write(format!("system/cpu/cpu{id}/topology/core_cpus_list"), siblings.join(","));
            if let Some(capacity) = cpu.capacity {
                write(format!("system/cpu/cpu{id}/cpu_capacity"), capacity.to_string());
            }
            if let Some(khz) = cpu.khz {
                write(format!("system/cpu/cpu{id}/cpufreq/cpuinfo_max_freq"), khz.to_string());
            }
        }
        if let Some(list) = performance {
            write("cpu_core/cpus".to_owned(), list.to_owned());
        }
        let allowed = parse_list(allowed).unwrap_or_default();
        let parallelism = allowed.len().max(1).min(quota);
        Topology::read(folder.path(), &allowed, parallelism)
    }

    /// Equal cores: how many, hardware threads of each, what is special about them.
    type Group = (usize, usize, fn(&mut Cpu));

    /// The cores of all groups, numbered one after another.
    fn machine(groups: &[Group]) -> Vec<Cpu> {
        let mut cpus = Vec::new();
        let mut core = 0;
        for (count, threads, change) in groups {
            for _ in 0..*count {
                let mut cpu = Cpu { core, ..Cpu::default() };
                change(&mut cpu);
                cpus.extend(std::iter::repeat_n(cpu, *threads));
                core += 1;
            }
        }
        cpus
    }

    const ALL: usize = usize::MAX;

    /// User report P74: halving the CPU count left most cores idle without SMT, and mixed cores were slower.
    #[test]
    fn p74_threads_are_the_fast_cores() {
        let smt = machine(&[(8, 2, |_| {})]);
        assert_eq!(read(&smt, None, "0-15", ALL), Topology { parallelism: 16, logical: 16, cores: 8, fast: 8 });
        let plain = machine(&[(20, 1, |_| {})]);
        assert_eq!(read(&plain, None, "0-19", ALL).threads(), 20);
        // Six performance cores with two threads each, eight efficient ones; nearly equal frequencies mislead.
        let intel = machine(&[(6, 2, |c| c.khz = Some(4_700_000)), (8, 1, |c| c.khz = Some(3_900_000))]);
        assert_eq!(read(&intel, Some("0-11"), "0-19", ALL).threads(), 6);
        // Dense cores next to full ones, favoured cores among these.
        let amd = machine(&[
            (1, 2, |c| c.khz = Some(5_200_000)),
            (3, 2, |c| c.khz = Some(5_000_000)),
            (8, 2, |c| c.khz = Some(3_300_000)),
        ]);
        assert_eq!(read(&amd, None, "0-23", ALL).threads(), 4);
        let little: fn(&mut Cpu) = |c| c.capacity = Some(325);
        let two_tiers = machine(&[(4, 1, little), (4, 1, |c| c.capacity = Some(1024))]);
        assert_eq!(read(&two_tiers, None, "0-7", ALL).threads(), 4);
        let three_tiers = machine(&[(4, 1, little), (3, 1, |c| c.capacity = Some(760)), (1, 1, |c| c.capacity = Some(1024))]);
        assert_eq!(read(&three_tiers, None, "0-7", ALL).threads(), 4);
        let equal = machine(&[(4, 1, |c| c.capacity = Some(1024))]);
        assert_eq!(read(&equal, None, "0-3", ALL).threads(), 4);
    }

    #[test]
    fn affinity_and_quota_limit_the_threads() {
        let smt = machine(&[(8, 2, |_| {})]);
        assert_eq!(read(&smt, None, "0-7", ALL).threads(), 4);
        assert_eq!(read(&smt, None, "1", ALL).threads(), 1);
        assert_eq!(read(&smt, None, "2,5", ALL).threads(), 2);
        assert_eq!(read(&smt, None, "0-15", 3).threads(), 3);
        let intel = machine(&[(6, 2, |_| {}), (8, 1, |_| {})]);
        assert_eq!(read(&intel, Some("0-11"), "12-19", ALL).threads(), 8, "only efficient cores are allowed");
        assert_eq!(read(&intel, Some("0-11"), "10-13", ALL).threads(), 1);
    }

    #[test]
    fn a_machine_that_tells_nothing_uses_what_it_may() {
        assert_eq!(read(&[], None, "", 1).threads(), 1);
        assert_eq!(read(&[], None, "0-5", ALL).threads(), 6);
        // A virtual machine that shows CPUs but no siblings, and one whose capacities are known in part.
        let partly = [Cpu { core: 0, capacity: Some(1024), khz: None }, Cpu { core: 1, ..Cpu::default() }];
        assert_eq!(read(&partly, None, "0-1", ALL).threads(), 2);
        assert!(Topology::detect().threads() >= 1);
    }

    #[test]
    fn lists_are_read() {
        let list = |text| parse_list(text).map(|cpus| cpus.into_iter().collect::<Vec<_>>());
        assert_eq!(list(" 0-2,7\n"), Some(vec![0, 1, 2, 7]));
        assert_eq!(list("3"), Some(vec![3]));
        for bad in ["", "a", "1-", "0-99999999999", "1,,2"] {
            assert_eq!(list(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_topology_is_told() {
        let text = |logical, cores, fast, parallelism| Topology { parallelism, logical, cores, fast }.to_string();
        assert_eq!(text(20, 14, 6, 20), "20 CPUs on 14 cores, 6 of them fast");
        assert_eq!(text(1, 1, 1, 1), "1 CPU on 1 core");
        assert_eq!(text(16, 8, 8, 4), "16 CPUs on 8 cores, quota of 4");
    }
}
