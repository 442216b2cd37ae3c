//! The `Range` of a download, so that a client fetches what is new, or goes on where it broke off.

use bytes::Bytes;
use futures::{Stream, StreamExt, stream};

/// What a `Range` header asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    Whole,
    /// These bytes: from the first to before the second.
    Bytes(u64, u64),
    /// Nothing of the file lies there.
    Nothing,
}

/// Reads a header. What is no single range of bytes asks for the whole file, as HTTP has it.
pub(super) fn wanted(header: Option<&str>, size: u64) -> Wanted {
    let Some((first, last)) = header
        .and_then(|text| text.strip_prefix("bytes="))
        .and_then(|range| range.split_once('-'))
    else {
        return Wanted::Whole;
    };
    let (first, last) = (first.trim(), last.trim());
    let number = |text: &str| text.parse::<u64>().ok();
    let (start, end) = match (number(first), number(last)) {
        // The last bytes.
        (None, Some(count)) if first.is_empty() => (size.saturating_sub(count), size),
        (Some(start), None) if last.is_empty() => (start, size),
        (Some(start), Some(last)) if start <= last => (start, last.saturating_add(1).min(size)),
        _ => return Wanted::Whole,
    };
    if start < end {
        Wanted::Bytes(start, end)
    } else {
        Wanted::Nothing
    }
}

/// The bytes of a stream from `start` to before `end`.
pub(super) fn window<E>(
    chunks: impl Stream<Item = Result<Bytes, E>>,
    start: u64,
    end: u64,
) -> impl Stream<Item = Result<Bytes, E>> {
    // The stream is asked for nothing behind the chunk with the last byte.
    let unread = (Box::pin(chunks), 0);
    stream::unfold(unread, move |(mut chunks, mut at)| async move {
        while at < end {
            let chunk = match chunks.next().await? {
                Ok(chunk) => chunk,
                Err(error) => return Some((Err(error), (chunks, end))),
            };
            let length = chunk.len() as u64;
            let [from, to] = [start, end].map(|edge| edge.saturating_sub(at).min(length));
            at += length;
            if from < to {
                // Both are at most the chunk's length.
                return Some((Ok(chunk.slice(from as usize..to as usize)), (chunks, at)));
            }
        }
        None
    })
}

#[cfg(test)]
mod tests {
    use futures::TryStreamExt;

    use super::*;

    #[test]
    fn headers_are_read_as_http_has_them() {
        for (header, found) in [
            (None, Wanted::Whole),
            (Some("bytes=0-"), Wanted::Bytes(0, 10)),
            (Some("bytes=3-"), Wanted::Bytes(3, 10)),
            (Some("bytes=3-5"), Wanted::Bytes(3, 6)),
            (Some("bytes=3-99"), Wanted::Bytes(3, 10)),
            (Some("bytes=-4"), Wanted::Bytes(6, 10)),
            (Some("bytes=-99"), Wanted::Bytes(0, 10)),
            (Some("bytes=10-"), Wanted::Nothing),
            (Some("bytes=-0"), Wanted::Nothing),
            (Some("bytes=5-3"), Wanted::Whole),
            (Some("bytes=1-2,4-5"), Wanted::Whole),
            (Some("lines=1-2"), Wanted::Whole),
            (Some("bytes=-"), Wanted::Whole),
        ] {
            assert_eq!(wanted(header, 10), found, "{header:?}");
        }
    }

    #[tokio::test]
    async fn a_window_cuts_chunks() {
        let read = std::cell::Cell::new(0);
        let take = async |start, end| {
            read.set(0);
            let chunks = ["abc", "", "defg", "hij", "never read"].map(|text| Ok::<_, ()>(Bytes::from(text)));
            let counted = futures::stream::iter(chunks).inspect(|_| read.set(read.get() + 1));
            let found: Vec<Bytes> = window(counted, start, end).try_collect().await.unwrap();
            found.concat()
        };
        assert_eq!(take(0, 10).await, b"abcdefghij");
        assert_eq!(read.get(), 4, "the rest is not read");
        assert_eq!(take(2, 5).await, b"cde");
        assert_eq!(take(4, 6).await, b"ef");
        assert_eq!(take(9, 10).await, b"j");
    }
}
