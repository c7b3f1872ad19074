//! Rotary position embeddings: the frequencies, and the cosines and sines of every position.
//!
//! Pair `i` of a head of `d` elements turns by `position * theta^(-2i/d)` (Su et al., "RoFormer",
//! 2021). Heads are half-split: pair `i` is elements `i` and `i + d/2`, see
//! [`crate::Tensor::with_paired_rows`] for files that store pairs side by side.

/// How a model stretches its rotary frequencies beyond the length it was first trained for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// Positions are divided by `factor`.
    Linear {
        /// At least 1.
        factor: f64,
    },
    /// Llama 3.1: long wavelengths are divided by `factor`, short ones kept, and those between
    /// the two bounds interpolated (Meta's `apply_scaling` in the Llama 3.1 release).
    Llama3 {
        /// Divisor of the long wavelengths.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are long.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are short.
        high_freq_factor: f64,
        /// Context length of the first training.
        original_context: f64,
    },
}

/// Angle per position of each of the `head_dim / 2` pairs, in radians.
pub fn frequencies(head_dim: usize, theta: f64, scaling: Option<RopeScaling>) -> Vec<f64> {
    (0..head_dim / 2).map(|i| scale(libm::pow(theta, -((2 * i) as f64) / head_dim as f64), scaling)).collect()
}

fn scale(frequency: f64, scaling: Option<RopeScaling>) -> f64 {
    match scaling {
        None => frequency,
        Some(RopeScaling::Linear { factor }) => frequency / factor,
        Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context }) => {
            let wavelength = 2.0 * std::f64::consts::PI / frequency;
            if wavelength < original_context / high_freq_factor {
                frequency
            } else if wavelength > original_context / low_freq_factor {
                frequency / factor
            } else {
                let smooth =
                    (original_context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            }
        }
    }
}

/// Cosines, then sines, of every pair at one position: `out` is `[2][head_dim / 2]`.
///
/// # Panics
/// If `out` is not twice as long as `frequencies`.
pub fn rotation(frequencies: &[f64], position: usize, out: &mut [f32]) {
    assert_eq!(out.len(), 2 * frequencies.len(), "one cosine and one sine for each pair");
    let (cos, sin) = out.split_at_mut(frequencies.len());
    for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(frequencies) {
        let angle = position as f64 * frequency;
        *cos = libm::cos(angle) as f32;
        *sin = libm::sin(angle) as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The frequencies as `transformers` computes them in float64 for Llama 3.2 1B (theta 5e5,
    /// head_dim 64, factor 32, 1 and 4, original context 8192), worked out by hand for the three
    /// bands: pair 0 is kept, pair 31 divided by 32, pair 16 (wavelength 4443) interpolated.
    #[test]
    fn llama3_bands() {
        let scaling = RopeScaling::Llama3 {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192.0,
        };
        let plain = frequencies(64, 5e5, None);
        let scaled = frequencies(64, 5e5, Some(scaling));
        assert_eq!(scaled[0], plain[0]);
        assert!((scaled[31] - plain[31] / 32.0).abs() < 1e-15);
        let f16 = 1.0 / 500_000_f64.sqrt();
        let smooth = (8192.0 * f16 / (2.0 * std::f64::consts::PI) - 1.0) / 3.0;
        let expected = f16 * (smooth + (1.0 - smooth) / 32.0);
        assert!((scaled[16] - expected).abs() < 1e-12, "{} {expected}", scaled[16]);
        for position in [0, 1000, 8192, 20_000] {
            let mut table = [0.0; 64];
            rotation(&scaled, position, &mut table);
            let angle = position as f64 * expected;
            assert!((f64::from(table[16]) - libm::cos(angle)).abs() < 1e-6);
            assert!((f64::from(table[48]) - libm::sin(angle)).abs() < 1e-6);
        }
    }

    #[test]
    fn linear_divides_positions() {
        let plain = frequencies(32, 1e4, None);
        let scaled = frequencies(32, 1e4, Some(RopeScaling::Linear { factor: 4.0 }));
        for position in [0_usize, 1000, 8192, 20_000] {
            let (mut a, mut b) = ([0.0; 32], [0.0; 32]);
            rotation(&plain, position, &mut a);
            rotation(&scaled, position * 4, &mut b);
            assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6));
        }
    }
}
