use super::*;

fn softmax(logits: &[f32], temperature: f64) -> Vec<f64> {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let e: Vec<f64> = logits.iter().map(|&l| (f64::from(l - best) / temperature).exp()).collect();
    let total: f64 = e.iter().sum();
    e.iter().map(|e| e / total).collect()
}

/// Probabilities after the filters, the slow and plain way.
fn expected(logits: &[f32], s: &Sampling) -> Vec<f64> {
    let p = softmax(logits, f64::from(s.temperature));
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    if s.top_k > 0 {
        order.truncate(s.top_k);
    }
    let of: f64 = order.iter().map(|&i| p[i]).sum();
    let mut so_far = 0.0;
    let len = order.iter().take_while(|&&i| {
        let before = so_far;
        so_far += p[i] / of;
        s.top_p >= 1.0 || before < f64::from(s.top_p)
    });
    let kept: Vec<usize> = len.copied().filter(|&i| p[i] >= f64::from(s.min_p) * p[order[0]]).collect();
    let total: f64 = kept.iter().map(|&i| p[i]).sum();
    let mut out = vec![0.0; p.len()];
    for i in kept {
        out[i] = p[i] / total;
    }
    out
}

fn noise(n: usize, seed: u64, spread: f64) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..n).map(|_| ((0..12).map(|_| random.unit()).sum::<f64>() - 6.0) as f32 * spread as f32).collect()
}

/// Pearson's chi-square against the expected probabilities, as a number of standard deviations.
fn deviation(counts: &[u32], p: &[f64]) -> f64 {
    let n: u32 = counts.iter().sum();
    let mut chi = 0.0;
    let mut cells = 0.0;
    for (&count, &p) in counts.iter().zip(p) {
        if p == 0.0 {
            assert_eq!(count, 0, "a token outside the kept set was drawn");
            continue;
        }
        let e = p * f64::from(n);
        if e >= 5.0 {
            chi += (f64::from(count) - e).powi(2) / e;
            cells += 1.0;
        }
    }
    if cells < 2.0 { 0.0 } else { (chi - (cells - 1.0)) / (2.0 * (cells - 1.0)).sqrt() }
}

#[test]
fn draws_follow_the_renormalised_probabilities() {
    let base = Sampling { temperature: 1.0, ..Default::default() };
    let variants = [
        base.clone(),
        Sampling { temperature: 0.7, ..base.clone() },
        Sampling { temperature: 1.5, top_k: 7, ..base.clone() },
        Sampling { top_p: 0.8, ..base.clone() },
        Sampling { min_p: 0.1, ..base.clone() },
        Sampling { temperature: 1.3, top_k: 20, top_p: 0.9, min_p: 0.05, ..base.clone() },
        Sampling { top_k: 1, ..base.clone() },
        Sampling { top_p: 1e-6, ..base.clone() },
        Sampling { temperature: 20.0, top_p: 0.95, ..base.clone() },
    ];
    for (i, sampling) in variants.into_iter().enumerate() {
        for size in [3, 40, 700] {
            let logits = noise(size, 7 + size as u64, 2.0);
            let mut sampler = Sampler::new(Sampling { seed: 1000 + i as u64, ..sampling.clone() });
            let mut counts = vec![0u32; size];
            for _ in 0..20_000 {
                counts[sampler.sample(&mut logits.clone(), &[]).id as usize] += 1;
            }
            let sigmas = deviation(&counts, &expected(&logits, &sampling));
            assert!(sigmas < 4.5, "variant {i}, {size} tokens: {sigmas}");
        }
    }
}

#[test]
fn top_p_keeps_the_smallest_set() {
    // 0.5, 0.25, 0.125, 0.125
    let logits: Vec<f32> = [0.125f32, 0.5, 0.125, 0.25].iter().map(|p| p.ln()).collect();
    for (top_p, allowed) in
        [(0.49, vec![1]), (0.51, vec![1, 3]), (0.74, vec![1, 3]), (0.8, vec![0, 1, 3]), (0.9, vec![0, 1, 2, 3])]
    {
        let mut sampler = Sampler::new(Sampling { temperature: 1.0, top_p, ..Default::default() });
        let mut seen: Vec<u32> = (0..500).map(|_| sampler.sample(&mut logits.clone(), &[]).id).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen, allowed, "top_p {top_p}");
    }
}

#[test]
fn greedy_ties_and_impossible_logits() {
    let mut greedy = Sampler::new(Sampling::default());
    let mut pick = |logits: &[f32]| greedy.sample(&mut logits.to_vec(), &[]);
    assert_eq!(pick(&[1.0, 3.0, 3.0, 2.0]).id, 1);
    assert_eq!(pick(&[1.0, 3.0, 3.0, 2.0]).margin, 0.0);
    assert_eq!(pick(&[f32::NAN, -2.0, f32::NAN, -1.0]).id, 3);
    assert_eq!(pick(&[f32::NAN, -2.0, f32::NAN, -1.0]).margin, 1.0);
    assert_eq!(pick(&[0.0, f32::INFINITY, f32::INFINITY]).id, 1);
    assert_eq!(pick(&[-0.0, 0.0]).id, 0);
    let only = pick(&[f32::NEG_INFINITY, -5.0]);
    assert_eq!((only.id, only.logprob, only.margin), (1, 0.0, f32::INFINITY));
    let nothing = pick(&[f32::NAN, f32::NEG_INFINITY]);
    assert_eq!((nothing.id, nothing.logprob), (0, f32::NEG_INFINITY));
    assert_eq!(pick(&[]).id, 0);
    for top_k in [0, 1, 2, 50] {
        let sampling = Sampling { temperature: 1.0, top_k, top_p: 0.9, min_p: 0.1, ..Default::default() };
        let mut warm = Sampler::new(sampling);
        for _ in 0..50 {
            let id = warm.sample(&mut [f32::NAN, 1.0, f32::NEG_INFINITY, 1.0], &[0, 1, 2, 99]).id;
            assert!(id == 1 || (id == 3 && top_k != 1), "top_k {top_k}: {id}");
        }
    }
}

#[test]
fn the_measures_are_of_the_raw_logits() {
    let logits = noise(5000, 3, 4.0);
    let p = softmax(&logits, 1.0);
    let mut sorted = logits.clone();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let sampling = Sampling { temperature: 2.0, top_k: 400, repetition_penalty: 1.7, ..Default::default() };
    let mut sampler = Sampler::new(sampling);
    let recent: Vec<u32> = (0..5000).collect();
    for _ in 0..200 {
        let choice = sampler.sample(&mut logits.clone(), &recent);
        assert!((f64::from(choice.logprob) - p[choice.id as usize].ln()).abs() < 2e-6);
        assert_eq!(choice.margin, sorted[0] - sorted[1]);
    }
}

#[test]
fn p15_each_recent_token_is_penalised_once_and_by_its_sign() {
    let sampling = Sampling { repetition_penalty: 2.0, repetition_window: 4, ..Default::default() };
    let mut sampler = Sampler::new(sampling.clone());
    let mut logits = [4.0, 3.0, -1.0, 2.5, 1.0];
    // Token 4 is outside the window, 99 outside the vocabulary; token 0 is there twice.
    let choice = sampler.sample(&mut logits, &[4, 0, 2, 99, 0]);
    assert_eq!(logits, [2.0, 3.0, -2.0, 2.5, 1.0]);
    assert_eq!(choice.id, 1, "the penalty counts in greedy mode");
    assert_eq!(choice.margin, 1.0);

    let mut off = Sampler::new(Sampling { repetition_penalty: 1.0, ..sampling.clone() });
    let mut logits = [4.0, 3.0];
    assert_eq!(off.sample(&mut logits, &[0, 0, 0, 0]).id, 0);
    assert_eq!(logits, [4.0, 3.0]);
    let mut none = Sampler::new(Sampling { repetition_window: 0, ..sampling });
    assert_eq!(none.sample(&mut logits, &[0, 0, 0, 0]).id, 0);
}

#[test]
fn p13_a_seed_fixes_the_draws() {
    let draws = |seed| {
        let mut sampler = Sampler::new(Sampling { temperature: 1.0, top_p: 0.95, seed, ..Default::default() });
        (0..40).map(|i| sampler.sample(&mut noise(300, i, 2.0), &[]).id).collect::<Vec<_>>()
    };
    assert_eq!(draws(5), draws(5));
    assert_ne!(draws(5), draws(6));
}

#[test]
fn partial_selection_is_a_full_sort_cut_short() {
    let mut kept = Vec::new();
    for (size, spread) in [(1, 1.0), (63, 1.0), (1000, 0.0), (5000, 3.0)] {
        let mut logits = noise(size, 11, spread);
        for logit in logits.iter_mut().step_by(3) {
            *logit = logit.round();
        }
        let mut all: Vec<(f32, u32)> = logits.iter().copied().zip(0..).collect();
        all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        for count in [1, 2, 17, 64, 999, size] {
            select_best(&mut kept, &logits, count);
            assert_eq!(kept, all[..count.min(size)], "{count} of {size}");
        }
    }
}

#[test]
fn the_exponential_is_accurate() {
    let mut worst = 0f64;
    for i in 0..870_000 {
        let x = -(i as f32) * 1e-4;
        let exact = f64::from(x).exp();
        worst = worst.max((f64::from(exp_of_negative(x)) - exact).abs() / exact);
    }
    assert!(worst < 3e-7, "{worst}");
    assert_eq!(exp_of_negative(0.0), 1.0);
    assert_eq!(exp_of_negative(f32::NEG_INFINITY), 0.0);
    assert_eq!(exp_of_negative(-1e30), 0.0);
}

/// Values of the authors' C code.
#[test]
fn the_generator_is_the_published_one() {
    let mut random = Random([1, 2, 3, 4]);
    let first: Vec<u64> = (0..5).map(|_| random.next()).collect();
    assert_eq!(first, [41943041, 58720359, 3588806011781223, 3591011842654386, 9228616714210784205]);
    assert_eq!(Random::new(1234567).0, [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]);
}

#[test]
fn values_out_of_range_are_named() {
    let ok = Sampling { temperature: 0.7, top_k: 40, top_p: 0.9, min_p: 0.05, repetition_penalty: 1.1, ..Default::default() };
    ok.validate().unwrap();
    Sampling::default().validate().unwrap();
    let bad = [
        (Sampling { temperature: -1.0, ..ok.clone() }, "temperature"),
        (Sampling { temperature: f32::NAN, ..ok.clone() }, "temperature"),
        (Sampling { top_p: 0.0, ..ok.clone() }, "top_p"),
        (Sampling { top_p: 1.5, ..ok.clone() }, "top_p"),
        (Sampling { min_p: -0.1, ..ok.clone() }, "min_p"),
        (Sampling { repetition_penalty: 0.0, ..ok.clone() }, "repetition_penalty"),
    ];
    for (sampling, name) in bad {
        let error = sampling.validate().unwrap_err();
        assert!(error.message().starts_with(name), "{error}");
        assert_eq!(error.exit_code(), 2);
        // Used all the same, it must not break.
        let id = Sampler::new(sampling).sample(&mut [1.0, 2.0, 0.5], &[1]).id;
        assert!(id < 3);
    }
}

/// Prints the cost for a vocabulary of 262,144: `cargo test --release -- --ignored --nocapture sampler_cost`.
#[test]
#[ignore = "a measurement"]
fn sampler_cost() {
    let logits = noise(262_144, 1, 3.0);
    let base = Sampling { temperature: 1.0, ..Default::default() };
    for sampling in [
        Sampling::default(),
        base.clone(),
        Sampling { top_k: 64, top_p: 0.95, ..base.clone() },
        Sampling { top_p: 0.95, ..base.clone() },
        Sampling { min_p: 0.1, ..base.clone() },
    ] {
        let mut sampler = Sampler::new(sampling.clone());
        let mut work = logits.clone();
        let best = (0..60).map(|_| {
            work.copy_from_slice(&logits);
            let start = std::time::Instant::now();
            std::hint::black_box(sampler.sample(&mut work, &[]));
            start.elapsed()
        });
        println!("{:?} per token at best for {sampling:?}", best.min());
    }
}

#[test]
fn what_was_said_counts_as_openai_counts_it() {
    let sampling = Sampling { presence_penalty: 0.3, frequency_penalty: 0.4, ..Default::default() };
    let mut sampler = Sampler::new(sampling.clone());
    let logits = [2.0f32, 1.5, 1.0];
    let total = logits.iter().map(|x| x.exp()).sum::<f32>().ln();
    // By hand: 2.0; 1.3 < 1.5; 1.3 > 0.8; 2.0 - 0.3 - 0.8 = 0.9 < 1.0.
    for expected in [0u32, 1, 0, 2] {
        let choice = sampler.sample(&mut logits.clone(), &[]);
        assert_eq!(choice.id, expected);
        assert!((choice.logprob - (logits[expected as usize] - total)).abs() < 1e-6, "of the logits as they were");
    }
    assert!(Sampling { presence_penalty: 2.1, ..sampling.clone() }.validate().is_err());
    assert!(Sampling { frequency_penalty: f32::NAN, ..sampling }.validate().is_err());
}

/// Tokens outside a set never come out, whatever the settings and even where the set is impossible; probability and margin
/// are those of all tokens.
#[test]
fn only_allowed_tokens_are_chosen() {
    let sets: [&[u32]; 4] = [&[0x8000_0001, 0, 1 << 9], &[0, 0, 1], &[!0, !0, !0, !0], &[0, 0x00ff_0000]];
    for (round, set) in (0..400u64).zip(sets.iter().cycle()) {
        let pick = |list: &[f32], by: u64| list[(round / by) as usize % list.len()];
        let sampling = Sampling {
            temperature: pick(&[0.0, 1.0, 8.0], 1),
            top_k: [0, 1, 3][(round / 3) as usize % 3],
            top_p: pick(&[1.0, 0.4], 2),
            min_p: pick(&[0.0, 0.5], 5),
            repetition_penalty: pick(&[1.0, 1.8], 7),
            seed: round,
            ..Default::default()
        };
        let mut logits = noise(100, round, 6.0);
        let in_set = |id: u32| set.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1);
        match round % 10 {
            8 => (0..).zip(&mut logits).filter(|(id, _)| in_set(*id)).for_each(|(_, logit)| *logit = f32::NEG_INFINITY),
            9 => logits.fill(f32::NAN),
            _ => {}
        }
        let raw = logits.clone();
        let recent: Vec<u32> = (0..100).step_by(3).collect();
        let choice = Sampler::new(sampling.clone()).sample_among(&mut logits, &recent, Some(set));
        assert!(in_set(choice.id), "{} is not in {set:x?} with {sampling:?}", choice.id);
        if round % 10 < 8 {
            let p = softmax(&raw, 1.0)[choice.id as usize];
            assert!((f64::from(choice.logprob) - p.ln()).abs() < 1e-4, "{} and {}", choice.logprob, p.ln());
            let mut sorted = raw;
            sorted.sort_unstable_by(|a, b| b.total_cmp(a));
            assert_eq!(choice.margin, sorted[0] - sorted[1]);
        }
    }
}
