//! Looking things up by name, with an error that helps.

/// A name that is not in a table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} {name:?}; known, nearest first: {}", known.join(", "))]
pub struct UnknownName {
    /// What was looked for: a GPU, a model, ….
    pub what: &'static str,
    /// The name as given.
    pub name: String,
    /// The names there are, nearest first.
    pub known: Vec<String>,
}

impl UnknownName {
    /// The error for `name`, with `known` sorted by distance from it.
    pub fn new<'a>(what: &'static str, name: &str, known: impl IntoIterator<Item = &'a str>) -> UnknownName {
        let mut known: Vec<String> = known.into_iter().map(str::to_owned).collect();
        let wanted = canonical(name);
        // Those that begin so are nearest, however long they are.
        known.sort_by_cached_key(|candidate| {
            (!candidate.starts_with(&wanted), edit_distance(&wanted, candidate), candidate.clone())
        });
        UnknownName { what, name: name.to_owned(), known }
    }
}

/// The form names have in the tables: lower case, with dashes for blanks and underscores.
pub fn canonical(name: &str) -> String {
    name.trim().to_lowercase().replace([' ', '_'], "-")
}

/// Levenshtein's distance in letters.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let substitute = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = substitute.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_count_edits() {
        for (a, b, distance) in [("", "abc", 3), ("h100", "h200", 1), ("kitten", "sitting", 3), ("a", "a", 0)]
        {
            assert_eq!((edit_distance(a, b), edit_distance(b, a)), (distance, distance));
        }
    }

    #[test]
    fn the_nearest_name_comes_first() {
        let error = UnknownName::new("GPU", "H_10O", ["b200", "h100", "h200"]);
        assert_eq!(error.to_string(), "unknown GPU \"H_10O\"; known, nearest first: h100, h200, b200");
        let error = UnknownName::new("preset", "azure", ["share", "azure-conv-2023"]);
        assert_eq!(error.known, ["azure-conv-2023", "share"]);
    }
}
