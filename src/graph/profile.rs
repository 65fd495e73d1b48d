//! Where the time of forward passes goes.

use std::collections::BTreeMap;
use std::time::Duration;

/// Time and number of runs of each kind of step.
#[derive(Debug, Default)]
pub struct Profile {
    by_kind: BTreeMap<String, (Duration, u64)>,
}

impl Profile {
    pub(super) fn add(&mut self, kind: &str, time: Duration) {
        match self.by_kind.get_mut(kind) {
            Some(entry) => *entry = (entry.0 + time, entry.1 + 1),
            None => {
                self.by_kind.insert(kind.to_owned(), (time, 1));
            }
        }
    }

    /// A line a kind, the most expensive first: milliseconds, share, runs.
    pub fn table(&self) -> String {
        let total: Duration = self.by_kind.values().map(|e| e.0).sum();
        let mut rows: Vec<_> = self.by_kind.iter().collect();
        rows.sort_by_key(|(_, e)| std::cmp::Reverse(e.0));
        let line = |(kind, (time, runs)): (&String, &(Duration, u64))| {
            let share = 100.0 * time.as_secs_f64() / total.as_secs_f64().max(1e-12);
            format!("{kind:28} {:10.3} ms {share:5.1} % {runs:7} runs\n", time.as_secs_f64() * 1e3)
        };
        rows.into_iter().map(line).collect()
    }
}
