//! Shapes as SVG.

use std::fmt::Write;

use super::{Anchor, Area, Colour, HEIGHT, Shape, WIDTH};

/// The whole document.
pub(super) fn document(shapes: &[Shape]) -> String {
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"Helvetica, Arial, sans-serif\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n"
    );
    let mut clips: Vec<Area> = vec![];
    for shape in shapes {
        // Writing to a String cannot fail.
        let _ = match shape {
            Shape::Line { points, width, colour, opacity, clip } => {
                let id = clips.iter().position(|c| c == clip).unwrap_or_else(|| {
                    clips.push(*clip);
                    let Area { left, top, right, bottom } = clip;
                    out += &format!(
                        "<clipPath id=\"c{}\"><rect x=\"{left}\" y=\"{top}\" width=\"{}\" height=\"{}\"/></clipPath>\n",
                        clips.len() - 1,
                        right - left,
                        bottom - top
                    );
                    clips.len() - 1
                });
                writeln!(
                    out,
                    "<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{width}\" stroke-opacity=\"{opacity}\" \
                     stroke-linejoin=\"round\" clip-path=\"url(#c{id})\"/>",
                    path(points),
                    hex(*colour)
                )
            }
            Shape::Dot { at, radius, colour } => {
                writeln!(
                    out,
                    "<circle cx=\"{:.2}\" cy=\"{:.2}\" r=\"{radius}\" fill=\"{}\"/>",
                    at.0,
                    at.1,
                    hex(*colour)
                )
            }
            Shape::Text { at, text, large, anchor, colour } => {
                let size = if *large { 19 } else { 14 };
                let anchor = match anchor {
                    Anchor::Start => "start",
                    Anchor::Middle => "middle",
                    Anchor::End => "end",
                };
                writeln!(
                    out,
                    "<text x=\"{:.2}\" y=\"{:.2}\" font-size=\"{size}\" text-anchor=\"{anchor}\" fill=\"{}\">{}</text>",
                    at.0,
                    // The position is the middle of the letters; SVG wants their base line.
                    at.1 + 0.35 * f64::from(size),
                    hex(*colour),
                    escape(text)
                )
            }
        };
    }
    out += "</svg>\n";
    out
}

/// Path data; a point that is not finite ends a stretch.
fn path(points: &[(f64, f64)]) -> String {
    let mut data = String::new();
    let mut pen_down = false;
    for (x, y) in points {
        if x.is_finite() && y.is_finite() {
            let command = if pen_down { 'L' } else { 'M' };
            let _ = write!(data, "{command}{x:.2} {y:.2}");
            pen_down = true;
        } else {
            pen_down = false;
        }
    }
    data
}

fn hex([r, g, b]: Colour) -> String {
    format!("#{r:02x}{g:02x}{b:02x}")
}

fn escape(text: &str) -> String {
    let clean = text.chars().filter(|c| !c.is_control());
    clean.collect::<String>().replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
