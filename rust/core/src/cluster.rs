//! Workers and their roles, as a topology string such as `2P1D` names them.

use std::fmt;
use std::str::FromStr;

/// Names a worker: its index in the cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u32);

impl WorkerId {
    /// As an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Prompts only; its KV is relayed.
    Prefill,
    /// Decode only (and recomputation of what it preempted).
    Decode,
    /// Both, in one batch.
    Mixed,
}

impl Role {
    /// Whether new prompts may be placed there.
    pub fn takes_prompts(self) -> bool {
        self != Role::Decode
    }

    /// Whether requests decode there.
    pub fn decodes(self) -> bool {
        self != Role::Prefill
    }

    /// The name used in tables and in Python.
    pub fn name(self) -> &'static str {
        match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Mixed => "mixed",
        }
    }
}

/// How many workers of each role: `xPyD`, `zM`, or a mix of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Topology {
    /// Prefill workers.
    pub num_prefill: u32,
    /// Decode workers.
    pub num_decode: u32,
    /// Mixed workers.
    pub num_mixed: u32,
}

/// Why a topology string is not one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// Not of the form `2P1D`, `3M`, `1P1D1M`.
    #[error(
        "topology {text:?}: {what} at character {at}; write counts and roles, as in \"2P1D\", \"3M\" or \"1P1D1M\""
    )]
    Syntax {
        /// The text.
        text: String,
        /// What is wrong.
        what: &'static str,
        /// Where, from 1.
        at: usize,
    },
    /// Nobody could serve a request.
    #[error(
        "topology {text:?} has {num_prefill} prefill, {num_decode} decode and {num_mixed} mixed workers; prefill and decode workers need each other"
    )]
    Unservable {
        /// The text.
        text: String,
        /// Prefill workers.
        num_prefill: u32,
        /// Decode workers.
        num_decode: u32,
        /// Mixed workers.
        num_mixed: u32,
    },
}

impl Topology {
    /// All workers.
    pub fn num_workers(&self) -> u32 {
        self.num_prefill + self.num_decode + self.num_mixed
    }

    /// Roles in worker order: prefill, then decode, then mixed.
    pub fn roles(&self) -> Vec<Role> {
        let of = |role, count: u32| std::iter::repeat_n(role, count as usize);
        of(Role::Prefill, self.num_prefill)
            .chain(of(Role::Decode, self.num_decode))
            .chain(of(Role::Mixed, self.num_mixed))
            .collect()
    }
}

/// The most workers a topology may name.
const MAX_WORKERS: u32 = 1 << 20;

impl FromStr for Topology {
    type Err = TopologyError;

    fn from_str(text: &str) -> Result<Topology, TopologyError> {
        let syntax = |what, at| TopologyError::Syntax { text: text.to_owned(), what, at };
        let mut counts = [None::<u32>; 3];
        let mut digits = String::new();
        for (at, letter) in text.chars().enumerate().map(|(at, letter)| (at + 1, letter)) {
            let slot = match letter.to_ascii_uppercase() {
                '0'..='9' => {
                    digits.push(letter);
                    continue;
                }
                'P' => 0,
                'D' => 1,
                'M' => 2,
                _ => return Err(syntax("unknown role (P, D and M are known)", at)),
            };
            if digits.is_empty() {
                return Err(syntax("no count before the role", at));
            }
            let count = digits.parse().ok().filter(|count| *count <= MAX_WORKERS);
            let count = count.ok_or_else(|| syntax("a count above 1048576", at))?;
            if counts[slot].replace(count).is_some() {
                return Err(syntax("a role named twice", at));
            }
            digits.clear();
        }
        if !digits.is_empty() {
            return Err(syntax("a count without a role", text.chars().count()));
        }
        let [num_prefill, num_decode, num_mixed] = counts.map(Option::unwrap_or_default);
        let half = (num_prefill == 0) != (num_decode == 0);
        if half && num_mixed == 0 || num_prefill + num_decode + num_mixed == 0 {
            let text = text.to_owned();
            return Err(TopologyError::Unservable { text, num_prefill, num_decode, num_mixed });
        }
        Ok(Topology { num_prefill, num_decode, num_mixed })
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (count, letter) in [(self.num_prefill, 'P'), (self.num_decode, 'D'), (self.num_mixed, 'M')] {
            if count > 0 {
                write!(f, "{count}{letter}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topologies_read_and_print() {
        for text in ["2P1D", "3M", "1P1D1M", "12P6D"] {
            assert_eq!(text.parse::<Topology>().unwrap().to_string(), text);
        }
        assert_eq!("1d2p".parse::<Topology>().unwrap().to_string(), "2P1D");
        assert_eq!("1P1D".parse::<Topology>().unwrap().roles(), [Role::Prefill, Role::Decode]);
    }

    #[test]
    fn what_is_not_a_topology_says_where() {
        for (text, part) in [
            ("", "need each other"),
            ("2P", "2 prefill, 0 decode"),
            ("0M", "need each other"),
            ("2X", "unknown role (P, D and M are known) at character 2"),
            ("P1D", "no count before the role at character 1"),
            ("1P1", "a count without a role"),
            ("1P1P1D", "a role named twice at character 4"),
            ("99999999999M", "a count above"),
        ] {
            let message = text.parse::<Topology>().unwrap_err().to_string();
            assert!(message.contains(part), "{text}: {message}");
        }
    }
}
