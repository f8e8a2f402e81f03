//! What Python would print: `json.dumps`, `str()` and `repr()` of template values, and `strftime`.
//!
//! Chat templates are written for Jinja2 on Python, and a model has seen exactly what that prints; one space more or
//! `true` for `True` are tokens that it has not.

use std::fmt::Write;

use minijinja::value::{Value, ValueKind};

/// How `json.dumps` lays a value out.
#[derive(Debug, Clone)]
pub(super) struct JsonStyle {
    pub(super) indent: Option<String>,
    pub(super) item_separator: String,
    pub(super) key_separator: String,
    pub(super) ensure_ascii: bool,
    pub(super) sort_keys: bool,
}

impl JsonStyle {
    /// Python's defaults: `", "` and `": "`, but `","` at line ends when indenting.
    pub(super) fn new(indent: Option<String>) -> Self {
        let item_separator = if indent.is_some() { "," } else { ", " }.into();
        Self { indent, item_separator, key_separator: ": ".into(), ensure_ascii: false, sort_keys: false }
    }
}

/// `json.dumps(value)`. Fails on what JSON cannot hold, with Python's wording.
pub(super) fn json_dumps(value: &Value, style: &JsonStyle) -> Result<String, String> {
    let mut out = String::new();
    write_json(&mut out, value, style, 0)?;
    Ok(out)
}

fn write_json(out: &mut String, value: &Value, style: &JsonStyle, depth: usize) -> Result<(), String> {
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push_str(&number(value, true)),
        ValueKind::String => json_string(out, value.as_str().unwrap_or_default(), style.ensure_ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            let items = value.try_iter().map_err(|e| e.to_string())?;
            let items: Vec<Value> = items.collect();
            list(out, style, depth, ['[', ']'], &items, |out, item| write_json(out, item, style, depth + 1))?;
        }
        ValueKind::Map => {
            let mut pairs = Vec::new();
            for key in value.try_iter().map_err(|e| e.to_string())? {
                let item = value.get_item(&key).map_err(|e| e.to_string())?;
                let name = match key.kind() {
                    ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
                    ValueKind::Bool => if key.is_true() { "true" } else { "false" }.into(),
                    ValueKind::None => "null".into(),
                    _ => number(&key, true),
                };
                pairs.push((name, item));
            }
            if style.sort_keys {
                pairs.sort_by(|a, b| a.0.cmp(&b.0));
            }
            list(out, style, depth, ['{', '}'], &pairs, |out, (name, item)| {
                json_string(out, name, style.ensure_ascii);
                out.push_str(&style.key_separator);
                write_json(out, item, style, depth + 1)
            })?;
        }
        ValueKind::Undefined => return Err("Object of type Undefined is not JSON serializable".into()),
        kind => return Err(format!("Object of type {kind} is not JSON serializable")),
    }
    Ok(())
}

fn list<T>(
    out: &mut String,
    style: &JsonStyle,
    depth: usize,
    brackets: [char; 2],
    items: &[T],
    mut write: impl FnMut(&mut String, &T) -> Result<(), String>,
) -> Result<(), String> {
    let newline = |out: &mut String, depth: usize| {
        if let Some(indent) = &style.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    };
    out.push(brackets[0]);
    for (i, item) in items.iter().enumerate() {
        if i > 0 {
            out.push_str(&style.item_separator);
        }
        newline(out, depth + 1);
        write(out, item)?;
    }
    if !items.is_empty() {
        newline(out, depth);
    }
    out.push(brackets[1]);
    Ok(())
}

fn json_string(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if (c as u32) < 0x20 => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c if ensure_ascii && !(' '..='~').contains(&c) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// A number as Python prints it; JSON has its own words for the three values that are none.
fn number(value: &Value, json: bool) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    match f64::try_from(value.clone()) {
        Ok(x) if json && x.is_nan() => "NaN".into(),
        Ok(x) if json && x.is_infinite() => if x > 0.0 { "Infinity" } else { "-Infinity" }.into(),
        Ok(x) => float_repr(x),
        Err(_) => value.to_string(),
    }
}

/// Python's `repr(float)`: the shortest digits, exponent form below 1e-4 and from 1e16.
pub(super) fn float_repr(x: f64) -> String {
    if x.is_nan() {
        return "nan".into();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf" } else { "-inf" }.into();
    }
    let magnitude = x.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{x:e}");
        let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, digits) = match exponent.strip_prefix('-') {
            Some(digits) => ('-', digits),
            None => ('+', exponent),
        };
        return format!("{mantissa}e{sign}{digits:0>2}");
    }
    let text = format!("{x}");
    if text.contains('.') { text } else { text + ".0" }
}

/// `str(value)`, what `{{ value }}` prints.
pub(super) fn python_str(value: &Value) -> String {
    match value.kind() {
        ValueKind::Undefined => String::new(),
        ValueKind::String => value.as_str().unwrap_or_default().to_owned(),
        _ => python_repr(value),
    }
}

/// `repr(value)`, what stands inside a printed list.
pub(super) fn python_repr(value: &Value) -> String {
    match value.kind() {
        ValueKind::None => "None".into(),
        ValueKind::Undefined => "Undefined".into(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.into(),
        ValueKind::Number => number(value, false),
        ValueKind::String => string_repr(value.as_str().unwrap_or_default()),
        ValueKind::Seq => match value.try_iter() {
            Ok(items) => {
                let items: Vec<String> = items.map(|v| python_repr(&v)).collect();
                match (value.is_tuple(), items.len()) {
                    (true, 1) => format!("({},)", items[0]),
                    (true, _) => format!("({})", items.join(", ")),
                    (false, _) => format!("[{}]", items.join(", ")),
                }
            }
            Err(_) => value.to_string(),
        },
        ValueKind::Map => match value.try_iter() {
            Ok(keys) => {
                let pair = |key: Value| {
                    let item = value.get_item(&key).unwrap_or(Value::UNDEFINED);
                    format!("{}: {}", python_repr(&key), python_repr(&item))
                };
                format!("{{{}}}", keys.map(pair).collect::<Vec<_>>().join(", "))
            }
            Err(_) => value.to_string(),
        },
        _ => value.to_string(),
    }
}

fn string_repr(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if (c as u32) < 0x20 || c == '\u{7f}' => {
                let _ = write!(out, "\\x{:02x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

/// A day of the calendar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Day {
    pub(super) year: i64,
    pub(super) month: u32,
    pub(super) day: u32,
}

impl Day {
    /// `YYYY-MM-DD`, if there is such a day.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.splitn(3, '-');
        let mut next = || parts.next().filter(|p| p.bytes().all(|b| b.is_ascii_digit()))?.parse::<u32>().ok();
        let (year, month, day) = (i64::from(next()?), next()?, next()?);
        let candidate = Self { year, month, day };
        (text.len() == 10 && Self::from_days(candidate.days()) == candidate).then_some(candidate)
    }

    /// Days since 1970-01-01 (H. Hinnant, "chrono-compatible low-level date algorithms").
    fn days(self) -> i64 {
        let year = if self.month <= 2 { self.year - 1 } else { self.year };
        let era = year.div_euclid(400);
        let year_of_era = year.rem_euclid(400);
        let shifted = (i64::from(self.month) + 9) % 12;
        let day_of_year = (153 * shifted + 2) / 5 + i64::from(self.day) - 1;
        era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
    }

    pub(super) fn from_days(days: i64) -> Self {
        let z = days + 719_468;
        let era = z.div_euclid(146_097);
        let doe = z.rem_euclid(146_097);
        let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
        let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
        let mp = (5 * doy + 2) / 153;
        let month = if mp < 10 { mp + 3 } else { mp - 9 };
        let year = yoe + era * 400 + i64::from(month <= 2);
        Self { year, month: month as u32, day: (doy - (153 * mp + 2) / 5 + 1) as u32 }
    }

    /// `datetime.strftime` for midnight of the day. Codes that templates do not use are left as they stand.
    pub(super) fn strftime(self, format: &str) -> String {
        const MONTHS: [&str; 12] = [
            "January",
            "February",
            "March",
            "April",
            "May",
            "June",
            "July",
            "August",
            "September",
            "October",
            "November",
            "December",
        ];
        const WEEKDAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
        let month = MONTHS[(self.month as usize - 1) % 12];
        let weekday = WEEKDAYS[self.days().rem_euclid(7) as usize];
        let day_of_year = self.days() - Self { month: 1, day: 1, ..self }.days() + 1;
        let mut out = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let (bare, code) = match chars.next() {
                Some('-') => (true, chars.next()),
                code => (false, code),
            };
            let padded = |n: i64, width: usize| if bare { n.to_string() } else { format!("{n:0width$}") };
            match code {
                Some('Y') => out.push_str(&self.year.to_string()),
                Some('y') => out.push_str(&padded(self.year.rem_euclid(100), 2)),
                Some('m') => out.push_str(&padded(self.month.into(), 2)),
                Some('d') => out.push_str(&padded(self.day.into(), 2)),
                Some('e') => out.push_str(&format!("{:2}", self.day)),
                Some('j') => out.push_str(&padded(day_of_year, 3)),
                Some('B') => out.push_str(month),
                Some('b' | 'h') => out.push_str(&month[..3]),
                Some('A') => out.push_str(weekday),
                Some('a') => out.push_str(&weekday[..3]),
                Some('H' | 'M' | 'S') => out.push_str(&padded(0, 2)),
                Some('I') => out.push_str("12"),
                Some('p') => out.push_str("AM"),
                Some('F') => out.push_str(&self.strftime("%Y-%m-%d")),
                Some('D') => out.push_str(&self.strftime("%m/%d/%y")),
                Some('T' | 'X') => out.push_str("00:00:00"),
                Some('%') => out.push('%'),
                Some(other) => {
                    out.push('%');
                    out.push(other);
                }
                None => out.push('%'),
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_as_in_python() {
        for (x, want) in [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e-5, "1.5e-05"),
            (0.0001, "0.0001"),
            (1e300, "1e+300"),
            (123_456.789, "123456.789"),
        ] {
            assert_eq!(float_repr(x), want);
        }
    }

    #[test]
    fn days_go_round() {
        assert_eq!(Day::from_days(0), Day { year: 1970, month: 1, day: 1 });
        for days in (-200_000..200_000).step_by(37) {
            assert_eq!(Day::from_days(days).days(), days);
        }
        let day = Day::parse("2024-07-26").unwrap();
        assert_eq!(day.strftime("%d %b %Y"), "26 Jul 2024");
        assert_eq!(day.strftime("%A, %B %-d, %j %y%%"), "Friday, July 26, 208 24%");
        assert_eq!(Day::parse("2024-02-30"), None);
        assert_eq!(Day::parse("2024-2-3"), None);
    }
}
