//! Passages by their words: BM25 (Robertson and Zaragoza, 2009, <https://doi.org/10.1561/1500000019>).

use std::collections::HashMap;

/// How soon more of the same word counts no more.
const K1: f64 = 1.5;
/// How much long passages are held back.
const B: f64 = 0.75;

/// Where words stand.
pub struct Words {
    /// For every word the passages that have it, and how often.
    places: HashMap<String, Vec<(u32, u32)>>,
    /// Words of every passage.
    lengths: Vec<f64>,
    mean_length: f64,
}

impl Words {
    pub fn new(texts: impl Iterator<Item = String>) -> Self {
        let (mut places, mut lengths) = (HashMap::<String, Vec<(u32, u32)>>::new(), Vec::new());
        for (at, text) in texts.enumerate() {
            let mut counts = HashMap::<String, u32>::new();
            let words = words(&text);
            lengths.push(words.len() as f64);
            words.into_iter().for_each(|word| *counts.entry(word).or_default() += 1);
            counts.into_iter().for_each(|(word, count)| places.entry(word).or_default().push((at as u32, count)));
        }
        let mean_length = lengths.iter().sum::<f64>() / lengths.len().max(1) as f64;
        Words { places, lengths, mean_length: mean_length.max(1.0) }
    }

    /// At most `most` passages that have words of the question, the best one first.
    pub fn rank(&self, question: &str, most: usize) -> Vec<usize> {
        let mut asked = words(question);
        asked.sort_unstable();
        asked.dedup();
        let mut scores = HashMap::<usize, f64>::new();
        for places in asked.iter().filter_map(|word| self.places.get(word)) {
            let (all, with) = (self.lengths.len() as f64, places.len() as f64);
            let rarity = ((all - with + 0.5) / (with + 0.5) + 1.0).ln();
            for (at, count) in places {
                let (at, count) = (*at as usize, f64::from(*count));
                let length = 1.0 - B + B * self.lengths[at] / self.mean_length;
                *scores.entry(at).or_default() += rarity * count * (K1 + 1.0) / (count + K1 * length);
            }
        }
        let mut ranking: Vec<(usize, f64)> = scores.into_iter().collect();
        ranking.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        ranking.into_iter().take(most).map(|(at, _)| at).collect()
    }
}

/// Words in lower case; of names such as `maxTokens` and `max_tokens` the whole and its parts.
fn words(text: &str) -> Vec<String> {
    let mut out = Vec::new();
    for name in text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|name| !name.is_empty()) {
        let mut parts = vec![String::new()];
        let mut small = false;
        for c in name.chars() {
            if c == '_' || (c.is_uppercase() && small) {
                parts.push(String::new());
            }
            small = c.is_lowercase() || c.is_numeric();
            if c != '_' {
                parts.last_mut().expect("there is always one").extend(c.to_lowercase());
            }
        }
        parts.retain(|part| !part.is_empty());
        if parts.len() > 1 {
            out.push(parts.concat());
        }
        out.append(&mut parts);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_words_too() {
        assert_eq!(words("The maxTokens, max_len2!"), ["the", "maxtokens", "max", "tokens", "maxlen2", "max", "len2"]);
        assert_eq!(words("__ ÄB é"), ["äb", "é"]);
    }

    /// Scores worked out by hand for three passages of 2, 2 and 4 words.
    #[test]
    fn rare_words_in_short_passages_count_most() {
        let words = Words::new(["stone river", "stone stone", "river water water stone"].map(str::to_owned).into_iter());
        assert_eq!(words.rank("water", 5), [2]);
        // `stone` stands everywhere: ln(0.5 / 3.5 + 1) = 0.1335; mean length 8 / 3. Of passage 1: 2 * 2.5 / (2 + 1.5 * 0.8125).
        assert_eq!(words.rank("stone", 5), [1, 0, 2]);
        assert_eq!(words.rank("river stone", 5), [0, 2, 1]);
        assert_eq!(words.rank("nothing", 5), [0; 0]);
    }
}
