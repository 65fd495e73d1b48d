//! Keeping the process on the fastest cores.

use cactus::error::Result;

/// Lets this thread, and all that it starts from now on, run on the `count` fastest CPUs only, each on a core of its
/// own as long as there are enough. Gives their numbers.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub fn pin(count: usize) -> Result<Vec<usize>> {
    use cactus::error::{Error, Kind};
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let refused = |e: rustix::io::Errno| Error::new(Kind::Io, format!("cannot pin to cores: {e}"));
    let may = sched_getaffinity(None).map_err(refused)?;
    let allowed: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| may.is_set(*cpu)).collect();
    if count > allowed.len() {
        let text = format!("{count} threads cannot be pinned to the {} CPUs that this process may use", allowed.len());
        return Err(Error::usage(text).with_hint("give fewer --threads, or leave out --pin"));
    }
    let mut cpus = linux::fastest(std::path::Path::new("/sys/devices/system/cpu"), &allowed);
    cpus.truncate(count);
    cpus.sort_unstable();
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu));
    sched_setaffinity(None, &set).map_err(refused)?;
    Ok(cpus)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub fn pin(_: usize) -> Result<Vec<usize>> {
    Err(cactus::error::Error::unsupported("--pin works on Linux and Android only"))
}

#[cfg(any(target_os = "linux", target_os = "android"))]
mod linux {
    use crate::commands::machine::read_number;
    use std::cmp::Reverse;
    use std::collections::BTreeSet;
    use std::path::Path;

    /// The CPUs `allowed`, fastest first; the second hardware threads of cores come last.
    pub fn fastest(devices: &Path, allowed: &[usize]) -> Vec<usize> {
        let number = |cpu: usize, file: &str| read_number(&devices.join(format!("cpu{cpu}/{file}")));
        let mut cores = BTreeSet::new();
        let mut ranked = Vec::new();
        for &cpu in allowed {
            let core = number(cpu, "topology/core_id").map(|core| (number(cpu, "topology/physical_package_id"), core));
            let second = core.is_some_and(|core| !cores.insert(core));
            let power = number(cpu, "cpu_capacity").or_else(|| number(cpu, "cpufreq/cpuinfo_max_freq")).unwrap_or(0);
            ranked.push((second, Reverse(power), cpu));
        }
        ranked.sort_unstable();
        ranked.into_iter().map(|(_, _, cpu)| cpu).collect()
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        /// A machine from the core, the capacity and the highest frequency of each CPU.
        fn ranked(cpus: &[(u64, Option<u64>, Option<u64>)], allowed: &[usize]) -> Vec<usize> {
            let folder = tempfile::tempdir().unwrap();
            for (id, (core, capacity, khz)) in cpus.iter().enumerate() {
                let cpu = folder.path().join(format!("cpu{id}"));
                std::fs::create_dir_all(cpu.join("topology")).unwrap();
                std::fs::create_dir_all(cpu.join("cpufreq")).unwrap();
                std::fs::write(cpu.join("topology/core_id"), core.to_string()).unwrap();
                let optional = [("cpu_capacity", capacity), ("cpufreq/cpuinfo_max_freq", khz)];
                for (file, value) in optional.into_iter().filter_map(|(file, value)| Some((file, value.as_ref()?))) {
                    std::fs::write(cpu.join(file), format!("{value}\n")).unwrap();
                }
            }
            fastest(folder.path(), allowed)
        }

        #[test]
        fn fast_cores_come_first_and_second_threads_last() {
            let big_little = [(0, Some(325), None), (1, Some(325), None), (2, Some(760), None), (3, Some(1024), None)];
            assert_eq!(ranked(&big_little, &[0, 1, 2, 3]), [3, 2, 0, 1]);
            assert_eq!(ranked(&big_little, &[0, 2]), [2, 0]);
            // Two performance cores with two threads each, two efficient ones.
            let hybrid: Vec<_> = [(0, 4_700_000), (0, 4_700_000), (1, 4_700_000), (1, 4_700_000), (2, 3_900_000), (3, 3_900_000)]
                .map(|(core, khz)| (core, None, Some(khz)))
                .into();
            assert_eq!(ranked(&hybrid, &[0, 1, 2, 3, 4, 5]), [0, 2, 4, 5, 1, 3]);
            // A machine that tells nothing.
            assert_eq!(fastest(Path::new("/no/such/folder"), &[4, 5]), [4, 5]);
        }
    }
}
