//! A trie of texts. One walk finds all texts that begin at a position, whatever their number.

/// A trie with a value at each node.
pub(crate) struct Trie<T> {
    nodes: Vec<Node<T>>,
}

struct Node<T> {
    /// Children, ascending by character.
    next: Vec<(char, u32)>,
    value: T,
}

/// The node at which every walk begins.
pub(crate) const ROOT: u32 = 0;

impl<T: Default> Trie<T> {
    pub(crate) fn new() -> Trie<T> {
        let root = Node {
            next: Vec::new(),
            value: T::default(),
        };
        Trie { nodes: vec![root] }
    }

    /// Adds a text. `visit` gets the value of each node on its path except the root, and whether
    /// the text ends at that node.
    pub(crate) fn insert(&mut self, text: impl Iterator<Item = char>, mut visit: impl FnMut(&mut T, bool)) {
        let mut at = ROOT;
        let mut text = text.peekable();
        while let Some(c) = text.next() {
            let next = &self.nodes[at as usize].next;
            at = match next.binary_search_by_key(&c, |(c, _)| *c) {
                Ok(place) => next[place].1,
                Err(place) => {
                    let new = self.nodes.len() as u32;
                    self.nodes[at as usize].next.insert(place, (c, new));
                    self.nodes.push(Node {
                        next: Vec::new(),
                        value: T::default(),
                    });
                    new
                }
            };
            visit(&mut self.nodes[at as usize].value, text.peek().is_none());
        }
    }

    /// The child of `node` for `c`.
    pub(crate) fn step(&self, node: u32, c: char) -> Option<u32> {
        let next = &self.nodes[node as usize].next;
        let place = next.binary_search_by_key(&c, |(c, _)| *c).ok()?;
        Some(next[place].1)
    }

    pub(crate) fn value(&self, node: u32) -> &T {
        &self.nodes[node as usize].value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_passes_every_text_that_begins_there() {
        let mut trie = Trie::<Vec<u32>>::new();
        for (number, text) in (0..).zip(["<s>", "<", "<s>x", "é"]) {
            trie.insert(text.chars(), |numbers, ends| {
                if ends {
                    numbers.push(number);
                }
            });
        }
        let mut node = ROOT;
        let mut passed: Vec<u32> = Vec::new();
        for c in "<s>x".chars() {
            node = trie.step(node, c).unwrap();
            passed.extend(trie.value(node));
        }
        assert_eq!(passed, [1, 0, 2]);
        assert_eq!(trie.step(node, 'x'), None);
        assert!(trie.step(ROOT, 'é').is_some() && trie.step(ROOT, 's').is_none());
    }
}
