//! Reading a Hugging Face `config.json` with errors that name the key.

use super::spec::Rope;
use crate::error::{Error, Result};
use crate::kernels::elementwise::Act;
use serde_json::Value;

/// A `config.json` (or a part of one).
#[derive(Clone, Copy)]
pub struct Config<'a>(pub &'a Value);

impl<'a> Config<'a> {
    /// The value of `key`; JSON null counts as absent.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|v| !v.is_null())
    }

    fn wrong(&self, key: &str, expected: &str) -> Error {
        let value = self.get(key).map_or("missing".to_owned(), |v| format!("{v:.60}"));
        Error::unsupported(format!("config key {key} is {value}, expected {expected}"))
    }

    pub fn usize_or_none(&self, key: &str) -> Result<Option<usize>> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => match v.as_u64().and_then(|n| usize::try_from(n).ok()) {
                Some(n) => Ok(Some(n)),
                None => Err(self.wrong(key, "a whole number")),
            },
        }
    }

    pub fn usize(&self, key: &str) -> Result<usize> {
        self.usize_or_none(key)?.ok_or_else(|| self.wrong(key, "a whole number"))
    }

    pub fn f64_or_none(&self, key: &str) -> Result<Option<f64>> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => v.as_f64().filter(|x| x.is_finite()).map(Some).ok_or_else(|| self.wrong(key, "a number")),
        }
    }

    pub fn bool(&self, key: &str, absent: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(absent),
            Some(v) => v.as_bool().ok_or_else(|| self.wrong(key, "true or false")),
        }
    }

    pub fn str(&self, key: &str) -> Option<&'a str> {
        self.get(key).and_then(Value::as_str)
    }

    /// A list of strings with one entry a layer, such as `layer_types`.
    pub fn layer_strings(&self, key: &str, layers: usize) -> Result<Option<Vec<&'a str>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let list = value.as_array().map(|a| a.iter().filter_map(Value::as_str).collect::<Vec<_>>());
        match list {
            Some(list) if list.len() == layers => Ok(Some(list)),
            _ => Err(self.wrong(key, &format!("a list of {layers} strings"))),
        }
    }

    /// The activation of the MLP.
    pub fn act(&self) -> Result<Act> {
        let key = if self.get("hidden_activation").is_some() { "hidden_activation" } else { "hidden_act" };
        match self.str(key) {
            Some("silu" | "swish") => Ok(Act::Silu),
            Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Act::GeluTanh),
            Some("gelu") => Ok(Act::Gelu),
            _ => Err(self.wrong(key, "silu, gelu or gelu_pytorch_tanh")),
        }
    }

    /// Rotary settings: `rope_parameters` (one set, or one a layer type) or the older pair `rope_theta` and
    /// `rope_scaling`. `layer_type` picks among several sets.
    pub fn rope(&self, dims: usize, layer_type: Option<&str>) -> Result<RopeChoice> {
        let sets = self.get("rope_parameters").map(Config);
        let set = match (sets, layer_type) {
            (Some(sets), Some(kind)) if sets.get(kind).is_some() => sets.get(kind).map(Config),
            (sets, _) => sets,
        };
        let set = set.or_else(|| self.get("rope_scaling").map(Config)).unwrap_or(Config(&Value::Null));
        let theta = match set.f64_or_none("rope_theta")? {
            Some(theta) => theta,
            None => self.f64_or_none("rope_theta")?.unwrap_or(10_000.0),
        };
        self.scaled_rope(dims, theta, set)
    }

    /// Frequencies for base `theta` under the scaling rule of `set` (the rules are those of Hugging Face
    /// transformers, `modeling_rope_utils`).
    fn scaled_rope(&self, dims: usize, theta: f64, set: Config) -> Result<RopeChoice> {
        // Computed in f32 like the reference, whose tables are f32 too.
        let plain: Vec<f32> = (0..dims / 2).map(|i| 1.0 / (theta as f32).powf((2 * i) as f32 / dims as f32)).collect();
        let choice = |frequencies, scale| Ok(RopeChoice { rope: Rope { frequencies, scale }, max_context: None });
        let number = |key: &str| set.f64_or_none(key)?.ok_or_else(|| set.wrong(key, "a number"));
        let trained = || match set.f64_or_none("original_max_position_embeddings")? {
            Some(n) => Ok(n),
            None => match self.f64_or_none("original_max_position_embeddings")? {
                Some(n) => Ok(n),
                None => Ok(self.usize("max_position_embeddings")? as f64),
            },
        };
        match set.str("rope_type").or_else(|| set.str("type")).unwrap_or("default") {
            "default" => choice(plain, 1.0),
            "linear" => {
                let factor = number("factor")? as f32;
                choice(plain.iter().map(|f| f / factor).collect(), 1.0)
            }
            "llama3" => {
                let (factor, low, high) = (number("factor")?, number("low_freq_factor")?, number("high_freq_factor")?);
                let trained = trained()?;
                let scaled = |f: &f32| {
                    let f = f64::from(*f);
                    let wavelength = std::f64::consts::TAU / f;
                    let smooth = (trained / wavelength - low) / (high - low);
                    let blended = (1.0 - smooth) * f / factor + smooth * f;
                    let long = wavelength > trained / low;
                    let short = wavelength < trained / high;
                    (if long {
                        f / factor
                    } else if short {
                        f
                    } else {
                        blended
                    }) as f32
                };
                choice(plain.iter().map(scaled).collect(), 1.0)
            }
            "yarn" => self.yarn(dims, theta, set, &plain, trained()?),
            "longrope" | "su" => {
                // The short factors hold up to the trained length; the context is limited to it.
                let trained = trained()?;
                let longest = self.usize("max_position_embeddings")? as f64;
                let factors = set.list("short_factor", dims / 2)?;
                let stretch = set.f64_or_none("factor")?.unwrap_or(longest / trained);
                let scale = match set.f64_or_none("attention_factor")? {
                    Some(f) => f,
                    None if stretch <= 1.0 => 1.0,
                    None => (1.0 + stretch.ln() / trained.ln()).sqrt(),
                };
                let frequencies = plain.iter().zip(factors).map(|(f, factor)| f / factor as f32).collect();
                Ok(RopeChoice { rope: Rope { frequencies, scale: scale as f32 }, max_context: Some(trained as usize) })
            }
            // Divisors that a GGUF file lists one by one.
            "factors" => {
                let factors = set.list("factors", dims / 2)?;
                choice(plain.iter().zip(factors).map(|(f, factor)| f / factor as f32).collect(), 1.0)
            }
            other => Err(Error::unsupported(format!(
                "rope type {other} is not supported (supported: default, linear, llama3, yarn, longrope)"
            ))),
        }
    }

    /// YaRN (Peng et al., <https://arxiv.org/abs/2309.00071>).
    fn yarn(&self, dims: usize, theta: f64, set: Config, plain: &[f32], trained: f64) -> Result<RopeChoice> {
        let factor = match set.f64_or_none("factor")? {
            Some(f) => f,
            None => self.usize("max_position_embeddings")? as f64 / trained,
        };
        let or = |key: &str, absent: f64| set.f64_or_none(key).map(|v| v.unwrap_or(absent));
        let (fast, slow) = (or("beta_fast", 32.0)?, or("beta_slow", 1.0)?);
        let magnitude = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
        let scale = match (set.f64_or_none("attention_factor")?, set.f64_or_none("mscale")?, set.f64_or_none("mscale_all_dim")?) {
            (Some(f), _, _) => f,
            (None, Some(m), Some(all)) if m != 0.0 && all != 0.0 => magnitude(m) / magnitude(all),
            _ => magnitude(1.0),
        };
        // The dimension whose wavelength fits `rotations` times into the trained length.
        let dimension = |rotations: f64| dims as f64 * (trained / (rotations * std::f64::consts::TAU)).ln() / (2.0 * theta.ln());
        let (mut low, mut high) = (dimension(fast), dimension(slow));
        if set.bool("truncate", true)? {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(dims as f64 - 1.0));
        if low == high {
            high += 0.001;
        }
        let blend = |(i, f): (usize, &f32)| {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            let f = f64::from(*f);
            (f / factor * ramp + f * (1.0 - ramp)) as f32
        };
        let frequencies = plain.iter().enumerate().map(blend).collect();
        Ok(RopeChoice { rope: Rope { frequencies, scale: scale as f32 }, max_context: None })
    }

    fn list(&self, key: &str, len: usize) -> Result<Vec<f64>> {
        let list = self.get(key).and_then(Value::as_array).map(|a| a.iter().filter_map(Value::as_f64).collect::<Vec<_>>());
        list.filter(|l| l.len() == len && l.iter().all(|x| *x > 0.0))
            .ok_or_else(|| self.wrong(key, &format!("{len} positive numbers")))
    }
}

/// A rotary table, and the context it is good for when that is shorter than the model's.
pub struct RopeChoice {
    pub rope: Rope,
    pub max_context: Option<usize>,
}
