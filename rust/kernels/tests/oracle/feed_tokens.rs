//! Ids from the host and from slots.

pub(crate) fn feed(sources: &[i32], last: &[i32]) -> Vec<i32> {
    let one = |&source: &i32| if source < -1 { last[(-2 - source) as usize] } else { source };
    sources.iter().map(one).collect()
}
