//! From logits to one token: repetition penalty, temperature, top-k, top-p, min-p, in this order, then a
//! draw from what is left.

use crate::error::{Error, Result};

/// Temperatures up to this one are greedy.
pub const GREEDY_TEMPERATURE: f32 = 0.01;

/// How a token is chosen. The default is greedy and changes nothing else.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by this; up to [`GREEDY_TEMPERATURE`] the likeliest token is taken. Default 0.
    pub temperature: f32,
    /// Only the k likeliest tokens; 0 (default) is no limit.
    pub top_k: usize,
    /// Only the fewest likeliest tokens that together reach this probability; 1 (default) is no limit.
    pub top_p: f32,
    /// Only tokens at least this likely in proportion to the likeliest; 0 (default) is no limit.
    pub min_p: f32,
    /// A token of the recent window has its logit divided by this if positive, multiplied if negative,
    /// once however often it occurs (Keskar et al. 2019, arXiv:1909.05858). Default 1: no effect.
    pub repetition_penalty: f32,
    /// How many tokens back the penalty looks. Default 64.
    pub repetition_window: usize,
    /// Taken from the logit of every token that the answer holds already, -2 to 2. Default 0.
    pub presence_penalty: f32,
    /// Taken from the logit of a token as often as the answer holds it, -2 to 2. Default 0.
    pub frequency_penalty: f32,
    /// The same seed draws the same tokens from the same logits on every machine. Default 0.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            repetition_window: 64,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
        }
    }
}

impl Sampling {
    /// Refuses values outside their range.
    pub fn validate(&self) -> Result<()> {
        let check = |ok: bool, name: &str, value: f32, range: &str| {
            if ok { Ok(()) } else { Err(Error::usage(format!("{name} is {value}, but must be {range}"))) }
        };
        let Sampling { temperature, top_p, min_p, repetition_penalty, .. } = *self;
        check(temperature.is_finite() && temperature >= 0.0, "temperature", temperature, "0 or more")?;
        check(top_p > 0.0 && top_p <= 1.0, "top_p", top_p, "above 0 and at most 1")?;
        check((0.0..=1.0).contains(&min_p), "min_p", min_p, "from 0 to 1")?;
        for (name, value) in [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)] {
            check((-2.0..=2.0).contains(&value), name, value, "from -2 to 2")?;
        }
        let penalty_ok = repetition_penalty.is_finite() && repetition_penalty > 0.0;
        check(penalty_ok, "repetition_penalty", repetition_penalty, "above 0")
    }

    fn is_greedy(&self) -> bool {
        self.temperature <= GREEDY_TEMPERATURE || self.temperature.is_nan()
    }
}

/// A chosen token, and how sure the model was. Both measures are of the logits as they were given, before
/// the penalty and at temperature 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    pub id: u32,
    /// Natural logarithm of the token's probability.
    pub logprob: f32,
    /// Best logit minus second best, whichever was chosen; infinite if only one token was possible.
    pub margin: f32,
}

/// Chooses tokens for one answer.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    random: Random,
    /// Distinct tokens of the window, ascending, and their logits before the penalty.
    recent: Vec<u32>,
    recent_logits: Vec<f32>,
    /// Tokens of the answer, ascending, how often each was chosen, and its logit before penalties.
    said: Vec<(u32, u32, f32)>,
    /// Candidates, best first once sorted, with their weights: exp((logit - best logit) / temperature).
    kept: Vec<(f32, u32)>,
    weights: Vec<f32>,
}

impl Sampler {
    /// Values that [`Sampling::validate`] refuses act as the nearest sensible ones.
    pub fn new(sampling: Sampling) -> Self {
        let random = Random::new(sampling.seed);
        let (recent, recent_logits, said) = Default::default();
        Sampler { sampling, random, recent, recent_logits, said, kept: Vec::new(), weights: Vec::new() }
    }

    pub fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    /// Chooses a token. `logits` is the whole vocabulary and is used as work space; `recent` is the
    /// timeline so far, newest last. NaN counts as impossible, ties go to the lowest id. If nothing is
    /// possible the answer is id 0 with log-probability minus infinity.
    pub fn sample(&mut self, logits: &mut [f32], recent: &[u32]) -> Choice {
        self.sample_among(logits, recent, None)
    }

    /// As [`Sampler::sample`], but only among the tokens of `allowed` (bit `id % 32` of word `id / 32`), of which there
    /// must be one: the first of them where all are impossible. Log-probability and margin are those of the whole
    /// vocabulary.
    pub fn sample_among(&mut self, logits: &mut [f32], recent: &[u32], allowed: Option<&[u32]>) -> Choice {
        let first = allowed.and_then(first_set);
        let Some(raw) = survey(logits) else {
            return Choice { id: first.unwrap_or(0), logprob: f32::NEG_INFINITY, margin: f32::INFINITY };
        };
        self.lower_said(logits);
        self.penalise(logits, recent);
        if let Some(allowed) = allowed {
            forbid_others(logits, allowed);
        }
        let id = match first {
            Some(first) if largest(logits) == f32::NEG_INFINITY => first,
            _ if self.sampling.is_greedy() => argmax(logits),
            _ => self.draw(logits),
        };
        let said = self.said.binary_search_by_key(&id, |said| said.0);
        let logit = match (said, self.recent.binary_search(&id)) {
            (Ok(at), _) => self.said[at].2,
            (_, Ok(at)) => self.recent_logits[at],
            _ => logits[id as usize],
        };
        match said {
            Ok(at) => self.said[at].1 += 1,
            Err(at) if self.counts_said() => self.said.insert(at, (id, 1, logit)),
            Err(_) => {}
        }
        let logprob = (f64::from(logit) - raw.log_sum) as f32;
        Choice { id, logprob, margin: raw.best - raw.second }
    }

    fn counts_said(&self) -> bool {
        self.sampling.presence_penalty != 0.0 || self.sampling.frequency_penalty != 0.0
    }

    /// Presence and frequency penalties, as the OpenAI API defines them.
    fn lower_said(&mut self, logits: &mut [f32]) {
        let Sampling { presence_penalty, frequency_penalty, .. } = self.sampling;
        for (id, count, before) in &mut self.said {
            let logit = &mut logits[*id as usize];
            *before = *logit;
            *logit -= presence_penalty + frequency_penalty * *count as f32;
        }
    }

    fn penalise(&mut self, logits: &mut [f32], recent: &[u32]) {
        self.recent.clear();
        self.recent_logits.clear();
        let penalty = self.sampling.repetition_penalty;
        if penalty == 1.0 || !(penalty.is_finite() && penalty > 0.0) {
            return;
        }
        let window = &recent[recent.len().saturating_sub(self.sampling.repetition_window)..];
        self.recent.extend(window.iter().filter(|&&id| (id as usize) < logits.len()));
        self.recent.sort_unstable();
        self.recent.dedup();
        for &id in &self.recent {
            let logit = &mut logits[id as usize];
            self.recent_logits.push(*logit);
            let changed = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            *logit = changed.clamp(f32::MIN, f32::MAX).min(if logit.is_finite() { f32::MAX } else { f32::NEG_INFINITY });
        }
    }

    fn draw(&mut self, logits: &[f32]) -> u32 {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        let best = argmax(logits);
        let best_logit = logits[best as usize];
        let weight = |logit: f32| exp_of_negative((logit - best_logit) / temperature);
        let limit_k = if top_k == 0 { logits.len() } else { top_k.min(logits.len()) };
        let limit_p = if top_p > 0.0 && top_p < 1.0 { top_p } else { 1.0 };

        if limit_k == logits.len() && limit_p == 1.0 && min_p <= 0.0 {
            self.weights.clear();
            self.weights.extend(logits.iter().map(|&logit| weight(logit)));
            let point = self.random.unit() * sum(&self.weights);
            return walk(self.weights.iter().copied().zip(0..), point).unwrap_or(best);
        }

        // The share that top-p asks for is of what top-k left.
        let mut count = limit_k;
        let mut needed = f64::INFINITY;
        if limit_p < 1.0 {
            if limit_k == logits.len() {
                self.weights.clear();
                self.weights.extend(logits.iter().map(|&logit| weight(logit)));
                needed = sum(&self.weights) * f64::from(limit_p);
                count = count.min(FIRST_GUESS);
            } else {
                select_best(&mut self.kept, logits, limit_k);
                needed = self.kept.iter().map(|&(logit, _)| f64::from(weight(logit))).sum::<f64>() * f64::from(limit_p);
            }
        } else if min_p > 0.0 {
            count = count.min(FIRST_GUESS);
        }
        // A few candidates mostly suffice; more are taken only while the limits are not reached.
        loop {
            select_best(&mut self.kept, logits, count);
            let mut total = 0.0;
            let mut len = 0;
            let mut reached = false;
            for candidate in &mut self.kept {
                let share = weight(candidate.0);
                if total >= needed || (len > 0 && (share < min_p || share == 0.0)) {
                    reached = true;
                    break;
                }
                candidate.0 = share;
                total += f64::from(share);
                len += 1;
            }
            if reached || total >= needed || self.kept.len() < count || count >= limit_k {
                let point = self.random.unit() * total;
                return walk(self.kept[..len].iter().copied(), point).unwrap_or(best);
            }
            count = count.saturating_mul(8).min(limit_k);
        }
    }
}

/// Candidates that are looked at before it is known how many are needed.
const FIRST_GUESS: usize = 128;

/// What the logits say before anything is done to them.
struct Survey {
    best: f32,
    second: f32,
    /// ln of the sum of exp(logit).
    log_sum: f64,
}

/// Makes NaN impossible and infinity finite, and measures; `None` if no token is possible.
fn survey(logits: &mut [f32]) -> Option<Survey> {
    for logit in logits.iter_mut() {
        let number = if logit.is_nan() { f32::NEG_INFINITY } else { *logit };
        // Adding 0 makes -0 equal to 0 in every order.
        *logit = if number < f32::MAX { number + 0.0 } else { f32::MAX };
    }
    let best = largest(logits);
    if best == f32::NEG_INFINITY {
        return None;
    }
    let at = argmax(logits) as usize;
    let second = largest(&logits[..at]).max(largest(&logits[at + 1..]));
    let total: f64 = logits
        .chunks(CHUNK)
        .map(|chunk| {
            let (eights, rest) = chunk.as_chunks::<8>();
            let mut lanes = [0f32; 8];
            for eight in eights {
                for (lane, &logit) in lanes.iter_mut().zip(eight) {
                    *lane += exp_of_negative(logit - best);
                }
            }
            lanes.into_iter().chain(rest.iter().map(|&logit| exp_of_negative(logit - best))).map(f64::from).sum::<f64>()
        })
        .sum();
    Some(Survey { best, second, log_sum: f64::from(best) + total.ln() })
}

/// The `count` likeliest ids, best first, with the natural logarithms of their probabilities. Ties go to the lowest id.
pub fn likeliest(logits: &mut [f32], count: usize) -> Vec<(u32, f32)> {
    let Some(raw) = survey(logits) else { return Vec::new() };
    let mut best: Vec<(u32, f32)> = Vec::with_capacity(count + 1);
    for (id, &logit) in logits.iter().enumerate() {
        if best.len() < count || best.last().is_some_and(|worst| logit > worst.1) {
            let at = best.partition_point(|other| other.1 >= logit);
            best.insert(at, (id as u32, logit));
            best.truncate(count);
        }
    }
    best.iter().map(|&(id, logit)| (id, (f64::from(logit) - raw.log_sum) as f32)).collect()
}

/// The lowest id of a set.
fn first_set(set: &[u32]) -> Option<u32> {
    (0..).zip(set).find(|(_, word)| **word != 0).map(|(at, word)| at * 32 + word.trailing_zeros())
}

/// Makes all tokens outside a set impossible.
fn forbid_others(logits: &mut [f32], set: &[u32]) {
    for (chunk, word) in logits.chunks_mut(32).zip(set.iter().copied().chain(std::iter::repeat(0))) {
        match word {
            0 => chunk.fill(f32::NEG_INFINITY),
            u32::MAX => {}
            _ => {
                for (bit, logit) in chunk.iter_mut().enumerate() {
                    if word >> bit & 1 == 0 {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }
}

/// Summed in f32 within a chunk, in f64 across them.
const CHUNK: usize = 256;

fn sum(weights: &[f32]) -> f64 {
    weights.chunks(CHUNK).map(|chunk| chunk.iter().map(|&w| f64::from(w)).sum::<f64>()).sum()
}

/// The first entry at which the running sum passes `point`; the last one that has any weight if rounding
/// let it run past the end.
fn walk(weighted: impl Iterator<Item = (f32, u32)>, mut point: f64) -> Option<u32> {
    let mut last = None;
    for (weight, id) in weighted {
        if weight > 0.0 {
            last = Some(id);
            point -= f64::from(weight);
            if point < 0.0 {
                break;
            }
        }
    }
    last
}

/// The largest of `logits`, which hold no NaN; in lanes, so that it becomes vector code.
fn largest(logits: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    let (eights, rest) = logits.as_chunks::<8>();
    let mut lanes = [f32::NEG_INFINITY; 8];
    for eight in eights {
        for (lane, &logit) in lanes.iter_mut().zip(eight) {
            *lane = larger(*lane, logit);
        }
    }
    lanes.into_iter().chain(rest.iter().copied()).fold(f32::NEG_INFINITY, larger)
}

/// The lowest id with the largest logit; 0 if there are none.
fn argmax(logits: &[f32]) -> u32 {
    let best = largest(logits);
    (0..).zip(logits).find(|&(_, &logit)| logit == best).map_or(0, |(id, _)| id)
}

/// Fills `kept` with the `count` best logits, best first, the lower id first among equals. One pass over
/// the logits with a rising threshold: nothing below the `count` best seen so far is looked at again.
fn select_best(kept: &mut Vec<(f32, u32)>, logits: &[f32], count: usize) {
    let order = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
    let room = count.saturating_mul(4).max(64).min(logits.len());
    kept.clear();
    kept.reserve(room);
    let mut threshold = f32::NEG_INFINITY;
    for (&logit, id) in logits.iter().zip(0..) {
        if logit > threshold {
            kept.push((logit, id));
            if kept.len() == room && room > count && count > 0 {
                kept.select_nth_unstable_by(count - 1, order);
                kept.truncate(count);
                threshold = kept[count - 1].0;
            }
        }
    }
    kept.sort_unstable_by(order);
    kept.truncate(count);
}

/// exp(x) for x <= 0 with a relative error below 2e-7, without a table or a call, so that loops over a
/// vocabulary become vector code and every machine gets the same bits. 0 below -87.
#[inline(always)]
fn exp_of_negative(x: f32) -> f32 {
    // Adding and taking away 1.5 * 2^23 rounds to a whole number.
    const ROUND: f32 = 12_582_912.0;
    let clamped = if x > -87.0 { x } else { -87.0 };
    let n = clamped * std::f32::consts::LOG2_E + ROUND;
    let whole = n - ROUND;
    // ln 2 in two parts, so that whole * ln 2 is exact enough.
    let r = (clamped - whole * 0.693_359_4) + whole * 2.121_944_4e-4;
    // Taylor series of exp on |r| <= ln 2 / 2.
    let series = 1.0 + r * (1.0 + r * (0.5 + r * (1.0 / 6.0 + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0))))));
    // The low bits of `n` are the whole number: shifted into the exponent they are 2^whole.
    let power = f32::from_bits(n.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23);
    if x < -87.0 { 0.0 } else { series * power }
}

/// xoshiro256++ (Blackman and Vigna 2019, <https://prng.di.unimi.it>), seeded by splitmix64.
#[derive(Clone, Debug)]
struct Random([u64; 4]);

impl Random {
    fn new(mut seed: u64) -> Self {
        Random(std::array::from_fn(|_| {
            seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        }))
    }

    fn next(&mut self) -> u64 {
        let s = &mut self.0;
        let result = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// Uniform in [0, 1), 53 bits.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
#[path = "sampler_tests.rs"]
mod tests;
