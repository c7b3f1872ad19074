//! Tokens put where their slots are.

pub(crate) fn keep(last: &mut [i32], tokens: &[i32], slots: &[i32]) {
    for (&token, &slot) in tokens.iter().zip(slots) {
        if let (0.., 0..) = (token, slot) {
            last[slot as usize] = token;
        }
    }
}
