//! How sure the model was of an answer, from its own token probabilities.
//!
//! A token counts with the probability that the best candidate has against the second best alone,
//! `sigmoid(best logit - second logit)`; an answer with the mean over its tokens. This is an indication,
//! not a calibrated probability of being right.

/// Running mean over the tokens of an answer.
#[derive(Clone, Debug, Default)]
pub struct Confidence {
    sum: f64,
    tokens: usize,
}

impl Confidence {
    /// Adds a token with `margin` between its best and second-best logit.
    pub fn add(&mut self, margin: f32) {
        self.sum += 1.0 / (1.0 + f64::from(-margin.clamp(-60.0, 60.0)).exp());
        self.tokens += 1;
    }

    /// Between 0.5 (two equal candidates throughout) and 1; `None` without tokens.
    pub fn value(&self) -> Option<f64> {
        (self.tokens > 0).then(|| self.sum / self.tokens as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_of_pairwise_probabilities() {
        let mut c = Confidence::default();
        assert_eq!(c.value(), None);
        c.add(0.0);
        c.add(3f32.ln());
        c.add(f32::INFINITY);
        assert!((c.value().unwrap() - (0.5 + 0.75 + 1.0) / 3.0).abs() < 1e-6);
    }
}
