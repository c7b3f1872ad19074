//! Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy
//! as 1, 2, 3" (SC 2011). The same on every device, and any draw can be computed alone.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Ten rounds over `counter` under `key`: four independent uniform words.
pub const fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let mut c = counter;
    let mut k = key;
    let mut round = 0;
    while round < 10 {
        let p0 = MULTIPLIERS[0] as u64 * c[0] as u64;
        let p1 = MULTIPLIERS[1] as u64 * c[2] as u64;
        c = [(p1 >> 32) as u32 ^ c[1] ^ k[0], p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ k[1], p0 as u32];
        k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
        round += 1;
    }
    c
}

/// The draw of request `seed` for the token at `position`, in `[0, 1)` with 53 bits: key = seed
/// (low word first), counter = position (low word first, upper two words zero).
pub fn uniform(seed: u64, position: u64) -> f64 {
    let key = [seed as u32, (seed >> 32) as u32];
    let [low, high, ..] = philox4x32_10([position as u32, (position >> 32) as u32, 0, 0], key);
    let bits = (u64::from(high) << 32 | u64::from(low)) >> 11;
    bits as f64 * (1.0 / (1_u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers published with Random123 (`kat_vectors`, philox4x32 10).
    #[test]
    fn known_answers() {
        assert_eq!(philox4x32_10([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let ones = u32::MAX;
        assert_eq!(philox4x32_10([ones; 4], [ones; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox4x32_10([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn uniform_is_uniform() {
        let draws: Vec<f64> = (0..10_000).map(|p| uniform(7, p)).collect();
        assert!(draws.iter().all(|u| (0.0..1.0).contains(u)));
        let mean = draws.iter().sum::<f64>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
        assert_ne!(uniform(7, 0), uniform(8, 0));
        assert_ne!(uniform(7, 0), uniform(7 | 1 << 40, 0));
    }
}
