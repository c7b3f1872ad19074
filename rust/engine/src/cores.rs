//! Which cores a worker's threads run on.

/// Cores that this process may use, in order.
pub(crate) fn available() -> Vec<usize> {
    let limit = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut cores = allowed().unwrap_or_else(|| (0..limit).collect());
    // A quota can be lower than the number of cores one may be put on.
    cores.truncate(limit);
    cores
}

#[cfg(target_os = "linux")]
fn allowed() -> Option<Vec<usize>> {
    // SAFETY: the set is plain memory for which zero is the empty set; the call writes no more than
    // the size it is given, and `CPU_ISSET` is asked about cores below that size only.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        let result = libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set);
        let all = 0..libc::CPU_SETSIZE as usize;
        (result == 0).then(|| all.filter(|&core| libc::CPU_ISSET(core, &set)).collect())
    }
}

#[cfg(not(target_os = "linux"))]
fn allowed() -> Option<Vec<usize>> {
    None
}

/// Threads of each of `workers` workers unless the user says: all cores, shared evenly.
pub(crate) fn threads_per_worker(cores: &[usize], workers: usize) -> usize {
    (cores.len() / workers.max(1)).max(1)
}

/// The cores of worker `index`, disjoint from every other worker's; none when there are not enough
/// for all, since two threads on one core are worse off than where the system puts them.
pub(crate) fn of_worker(cores: &[usize], workers: usize, threads: usize, index: usize) -> Vec<usize> {
    if workers * threads > cores.len() {
        return Vec::new();
    }
    cores[index * threads..(index + 1) * threads].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_share_no_core() {
        let cores: Vec<usize> = (10..18).collect();
        for workers in 1..10 {
            let threads = threads_per_worker(&cores, workers);
            let mut used: Vec<usize> =
                (0..workers).flat_map(|index| of_worker(&cores, workers, threads, index)).collect();
            let count = used.len();
            used.dedup();
            assert_eq!(used.len(), count);
            assert_eq!(count, if workers <= 8 { workers * threads } else { 0 });
            assert!(used.iter().all(|core| cores.contains(core)));
        }
        assert!(!available().is_empty());
    }
}
