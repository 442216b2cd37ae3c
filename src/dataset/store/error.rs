//! A store's error response, in one line.

use std::error::Error;

/// Maximum length of that line, in characters.
const LENGTH_MAX: usize = 300;

/// An error and its sources, outermost first.
pub fn chain<'e>(error: &'e (dyn Error + 'static)) -> impl Iterator<Item = &'e (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error: &&'e (dyn Error + 'static)| (*error).source())
}

/// The first error of type `E` among an error and its sources.
pub fn find_source<'e, E: Error + 'static>(error: &'e (dyn Error + 'static)) -> Option<&'e E> {
    chain(error).find_map(|error| error.downcast_ref())
}

/// The root cause of an object_store error in one line; the outer errors repeat its text. An XML
/// response is reduced to its code and message: the rest may be long, and may hold data that must
/// not be logged.
pub fn cause(error: &(dyn Error + 'static)) -> String {
    let text = chain(error).last().unwrap_or(error).to_string();
    let line = match text.split_once('<') {
        Some((before, xml)) => {
            let before = before.trim().trim_end_matches(':');
            let inside = [element(xml, "Code"), element(xml, "Message")];
            let inside: Vec<&str> = inside.into_iter().flatten().collect();
            if inside.is_empty() {
                before.to_string()
            } else {
                format!("{before}: {}", inside.join(": "))
            }
        }
        None => text,
    };
    let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
    let line = line.replace("Server returned non-2xx status code: ", "the store answered ");
    match line.char_indices().nth(LENGTH_MAX) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line.trim_end_matches('.').to_string(),
    }
}

/// The text of the first element called `name`.
fn element<'a>(xml: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = xml.split_once(&format!("<{name}>"))?;
    Some(rest.split_once('<')?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cause_of(text: &str) -> String {
        let inner = std::io::Error::other(text.to_string());
        cause(&object_store::Error::Generic {
            store: "S3",
            source: Box::new(inner),
        })
    }

    #[test]
    fn an_xml_answer_becomes_its_code_and_message() {
        let text = "Server returned non-2xx status code: 403 Forbidden: <?xml version=\"1.0\"?>\n<Error><Code>\
                    SignatureDoesNotMatch</Code><Message>Check your key.</Message><AWSAccessKeyId>AKIA</AWSAccessKeyId>\
                    </Error>";
        assert_eq!(
            cause_of(text),
            "the store answered 403 Forbidden: SignatureDoesNotMatch: Check your key"
        );
    }

    #[test]
    fn other_answers_are_one_short_line() {
        assert_eq!(cause_of("connection\n  refused"), "connection refused");
        assert_eq!(cause_of("503: <html>busy</html>"), "503");
        assert_eq!(cause_of(&"x".repeat(1000)).chars().count(), LENGTH_MAX + 1);
    }
}
