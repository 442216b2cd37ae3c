//! Files that are not what their first bytes or their names say, or that hold next to nothing: each is read as it is, or refused in a line.

use std::fs;
use std::path::Path;

use crate::commands::run;
use crate::input_sets::job;
use crate::support::{arg, py};

/// What `plan` says of a file: rows and broken rows, or what it is refused for.
#[track_caller]
fn planned(folder: &Path, name: &str, bytes: &[u8], expected: Result<(u64, u64), &str>) {
    fs::write(folder.join(name), bytes).unwrap();
    let (path, _) = job(folder, &format!("uri: {name}"), "{{ text }} ->", "", 10);
    let plan = run(&["plan", arg(&path), "--json"]);
    match expected {
        Ok((rows, broken)) => {
            let plan = plan.expect(0).json();
            assert_eq!(
                (&plan["rows"], &plan["broken_rows"]),
                (&rows.into(), &broken.into()),
                "{name}: {plan}"
            );
        }
        Err(says) => plan.expect(2).one_line(&[name, says]),
    }
    fs::remove_file(folder.join(name)).unwrap();
}

fn gzip(text: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let mut writer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    writer.write_all(text).unwrap();
    writer.finish().unwrap()
}

fn utf16(text: &str, is_big: bool) -> Vec<u8> {
    let bytes = |unit: u16| if is_big { unit.to_be_bytes() } else { unit.to_le_bytes() };
    text.encode_utf16().flat_map(bytes).collect()
}

#[test]
fn first_bytes_that_are_a_formats_by_chance_are_text() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for (name, text, rows) in [
        ("a.jsonl", "ARROW1 is no line\n{\"text\": \"x\"}\n", (2, 1)),
        ("a.txt", "ARROW1\nx\n", (2, 0)),
        ("a.csv", "ARROW1,text\n1,x\n", (1, 0)),
        ("p.jsonl", "PAR1\n{\"text\": \"x\"}\n", (2, 1)),
        ("p.txt", "PAR1 begins a text\nand another\n", (2, 0)),
        ("p.csv", "PAR1,text\n1,x\n2,y\n", (2, 0)),
        ("e.txt", "PARENT\n", (1, 0)),
    ] {
        planned(folder, name, text.as_bytes(), Ok(rows));
    }
    // What ends as it begins is Parquet, by whichever name.
    py(
        folder,
        "import pyarrow as pa, pyarrow.parquet as pq\npq.write_table(pa.table({'text': ['x', 'y']}), 'real')",
    );
    let real = fs::read(folder.join("real")).unwrap();
    planned(folder, "real.jsonl", &real, Ok((2, 0)));
    planned(folder, "real.csv", &real, Ok((2, 0)));
    for (name, bytes, codec) in [
        ("g.jsonl", &b"\x1f\x8b\x08 and no gzip"[..], "gzip"),
        ("z.txt", b"\x28\xb5\x2f\xfd and no zstd", "zstd"),
        ("b.txt", b"BZh91AY&SY is no song\n", "bzip2"),
    ] {
        planned(
            folder,
            name,
            bytes,
            Err(&format!("its {codec} data is damaged near byte ")),
        );
    }
}

#[test]
fn names_that_say_gzip_of_what_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let table = b"id,text\n1,\"a\nb\"\n2,c\n";
    let packed = gzip(table);
    planned(folder, "a.csv.gz", &packed, Ok((2, 0)));
    // Whoever fetched it has unpacked it.
    planned(folder, "a.csv.gz", table, Ok((2, 0)));
    planned(folder, "a.TSV.GZ", b"id\ttext\n1\tx\n", Ok((1, 0)));
    planned(folder, "a.jsonl.gz", b"{\"text\": \"x\"}\n", Ok((1, 0)));
    planned(folder, "a.txt.zst", "größer\n".as_bytes(), Ok((1, 0)));
    planned(folder, "a.csv.gz", b"", Ok((0, 0)));
    let neither = "its name ends in `.gz`, but it is neither compressed in that format nor text";
    planned(folder, "a.csv.gz", &packed[1..], Err(neither));
    planned(folder, "a.jsonl.gz", &packed[2..], Err(neither));
    planned(
        folder,
        "a.csv.gz",
        &packed[..packed.len() - 3],
        Err("it ends in the middle of its gzip data"),
    );
    planned(folder, "a.csv.gz", &gzip(&packed), Err("twice, or by a method"));
}

#[test]
fn next_to_nothing_is_no_row_and_that_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for name in ["e.jsonl", "e.txt", "e.csv", "e.tsv"] {
        planned(folder, name, b"", Ok((0, 0)));
        planned(folder, name, b"\xef\xbb\xbf", Ok((0, 0)));
    }
    for (name, bytes) in [
        ("h.csv", &b"id,text\n"[..]),
        ("h.csv", b"\xef\xbb\xbfid,text\r\n"),
        ("h.csv", b"id,text"),
        ("b.jsonl", b"\n  \r\n"),
    ] {
        planned(folder, name, bytes, Ok((0, 0)));
    }
    fs::write(folder.join("h.csv"), "id,text\n").unwrap();
    fs::write(folder.join("i.csv"), "id,text\n").unwrap();
    for (uri, says) in [
        ("h.csv", "h.csv` has no row: the job writes one part without rows"),
        ("\"?.csv\"", "none of 2 inputs has a row, such as `"),
    ] {
        let (path, output) = job(folder, &format!("uri: {uri}"), "{{ text }}", "id", 10);
        for command in [&["plan"][..], &["submit", "--no-enqueue"], &["run", "--quiet"]] {
            let _ = fs::remove_dir_all(&output);
            let arguments = [&command[..1], &[arg(&path)], &command[1..]].concat();
            run(&arguments).expect(0).one_line(&["warning", says]);
        }
        let columns = "import duckdb\nprint(duckdb.sql(\"describe from 'out/*.parquet'\").fetchall()[0][:2], duckdb.sql(\"from 'out/*.parquet'\").fetchall())";
        assert_eq!(py(folder, columns), "('id', 'VARCHAR') []\n");
        fs::remove_dir_all(&output).unwrap();
    }
    fs::write(folder.join("r.jsonl"), "{\"text\": \"x\"}\n").unwrap();
    let (path, _) = job(
        folder,
        "uri: r.jsonl, sample: {fraction: 0.000001}",
        "{{ text }}",
        "",
        10,
    );
    run(&["plan", arg(&path)])
        .expect(0)
        .one_line(&["`input.sample` draws none of 1 rows"]);
}

#[test]
fn line_ends_and_encodings() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for (name, text) in [
        ("w.csv", "\u{feff}id,text\r\n1,\"a\r\nb\"\r\n2,c\r\n"),
        ("w.jsonl", "\u{feff}{\"text\": \"a\"}\r\n\r\n{\"text\": \"b\"}\r\n"),
        ("w.txt", "\u{feff}a\r\nb\r\n"),
    ] {
        planned(folder, name, text.as_bytes(), Ok((2, 0)));
        let plain = text.trim_start_matches('\u{feff}');
        for is_big in [false, true] {
            let says = "it is UTF-16 text; convert it to UTF-8";
            planned(folder, name, &utf16(text, is_big), Err(says));
            planned(folder, name, &utf16(plain, is_big), Err(says));
            planned(folder, &format!("{name}.gz"), &gzip(&utf16(text, is_big)), Err(says));
        }
    }
    let latin = b"id,text,Stra\xdfe\n1,x,y\n";
    planned(
        folder,
        "l.csv",
        latin,
        Err("the header: cell 3: not UTF-8 at byte 5 of the cell; convert the file to UTF-8"),
    );
    // What stands in the file, to the byte, without the marks of either.
    fs::write(folder.join("w.csv"), "\u{feff}id,text\r\n1,\"a\r\nb\"\r\n2,ü\r\n").unwrap();
    let (path, _) = job(folder, "uri: w.csv", "{{ text }}", "id, text", 10);
    run(&["run", arg(&path), "--quiet"]).expect(0);
    let found = "import duckdb\nprint(duckdb.sql(\"select id, text from 'out/*.parquet' order by row\").fetchall())";
    assert_eq!(py(folder, found), "[(1, 'a\\r\\nb'), (2, 'ü')]\n");
}
