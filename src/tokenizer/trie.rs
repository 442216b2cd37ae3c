//! A trie of texts. A single walk finds all texts of the trie that begin at a position.

/// A trie of texts with a value at each node.
pub(crate) struct Trie<T> {
    nodes: Vec<Node<T>>,
}

struct Node<T> {
    /// Children, ascending by character.
    children: Vec<(char, u32)>,
    value: T,
}

/// The node at which every walk begins.
pub(crate) const ROOT: u32 = 0;

impl<T: Default> Trie<T> {
    pub(crate) fn new() -> Trie<T> {
        let root = Node {
            children: Vec::new(),
            value: T::default(),
        };
        Trie { nodes: vec![root] }
    }

    /// Adds a text. `visit` gets the value of each node on its path except the root, and whether
    /// the text ends at that node.
    pub(crate) fn insert(&mut self, text: impl Iterator<Item = char>, mut visit: impl FnMut(&mut T, bool)) {
        let mut node = ROOT;
        let mut text = text.peekable();
        while let Some(c) = text.next() {
            let children = &self.nodes[node as usize].children;
            node = match children.binary_search_by_key(&c, |(c, _)| *c) {
                Ok(position) => children[position].1,
                Err(position) => {
                    let new = self.nodes.len() as u32;
                    self.nodes[node as usize].children.insert(position, (c, new));
                    self.nodes.push(Node {
                        children: Vec::new(),
                        value: T::default(),
                    });
                    new
                }
            };
            visit(&mut self.nodes[node as usize].value, text.peek().is_none());
        }
    }

    /// The child of `node` for `c`.
    pub(crate) fn step(&self, node: u32, c: char) -> Option<u32> {
        let children = &self.nodes[node as usize].children;
        let position = children.binary_search_by_key(&c, |(c, _)| *c).ok()?;
        Some(children[position].1)
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
