//! Shapes as pixels, smooth edges included, and pixels as a PNG file.
//!
//! A line covers a pixel by how near its middle lies to the line: no path filling, no font machinery. A whole polyline
//! is first collected as coverage and then blended once, so that its joints are not darker than the rest.

use noto_sans_mono_bitmap::{FontWeight, RasterHeight, get_raster, get_raster_width};

use super::{Anchor, Area, Colour, HEIGHT, Shape, WHITE, WIDTH};

/// The bytes of a PNG file that shows the shapes.
pub(super) fn file(shapes: &[Shape]) -> Vec<u8> {
    let mut canvas = Canvas { pixels: vec![WHITE; WIDTH * HEIGHT], coverage: vec![0.0; WIDTH * HEIGHT] };
    for shape in shapes {
        canvas.draw(shape);
    }
    canvas.encode()
}

struct Canvas {
    pixels: Vec<Colour>,
    /// Scratch of [`Canvas::line`]: zero between shapes.
    coverage: Vec<f32>,
}

impl Canvas {
    fn draw(&mut self, shape: &Shape) {
        match shape {
            Shape::Line { points, width, colour, opacity, clip } => {
                self.line(points, *width, *clip);
                self.blend(*colour, *opacity);
            }
            Shape::Dot { at, radius, colour } => {
                let clip = Area { left: 0.0, top: 0.0, right: WIDTH as f64, bottom: HEIGHT as f64 };
                self.segment(*at, *at, 2.0 * radius, clip);
                self.blend(*colour, 1.0);
            }
            Shape::Text { at, text, large, anchor, colour } => self.text(*at, text, *large, *anchor, *colour),
        }
    }

    fn line(&mut self, points: &[(f64, f64)], width: f64, clip: Area) {
        for pair in points.windows(2) {
            let finite = [pair[0].0, pair[0].1, pair[1].0, pair[1].1].iter().all(|v| v.is_finite());
            if finite {
                self.segment(pair[0], pair[1], width, clip);
            }
        }
    }

    /// Raises the coverage of the pixels near a straight line.
    fn segment(&mut self, a: (f64, f64), b: (f64, f64), width: f64, clip: Area) {
        let reach = width / 2.0 + 1.0;
        let columns = pixels(a.0.min(b.0) - reach, a.0.max(b.0) + reach, clip.left, clip.right, WIDTH);
        let (dx, dy) = (b.0 - a.0, b.1 - a.1);
        let length2 = dx * dx + dy * dy;
        for x in columns {
            let px = x as f64 + 0.5;
            // Of a steep line, only the rows near this column.
            let (mut top, mut bottom) = (a.1.min(b.1), a.1.max(b.1));
            if dx.abs() > 1e-9 {
                let at = |x: f64| a.1 + (x - a.0) / dx * dy;
                let (left, right) = (at(px - reach), at(px + reach));
                (top, bottom) = (top.max(left.min(right)), bottom.min(left.max(right)));
            }
            for y in pixels(top - reach, bottom + reach, clip.top, clip.bottom, HEIGHT) {
                let py = y as f64 + 0.5;
                let along = if length2 > 0.0 { ((px - a.0) * dx + (py - a.1) * dy) / length2 } else { 0.0 };
                let along = along.clamp(0.0, 1.0);
                let distance = (px - a.0 - along * dx).hypot(py - a.1 - along * dy);
                let covered = (width / 2.0 + 0.5 - distance).clamp(0.0, 1.0) as f32;
                let cell = &mut self.coverage[y * WIDTH + x];
                *cell = cell.max(covered);
            }
        }
    }

    /// Paints what is covered, and clears the coverage.
    fn blend(&mut self, colour: Colour, opacity: f64) {
        for (pixel, covered) in self.pixels.iter_mut().zip(&mut self.coverage) {
            if *covered > 0.0 {
                mix(pixel, colour, *covered * opacity as f32);
                *covered = 0.0;
            }
        }
    }

    fn text(&mut self, at: (f64, f64), text: &str, large: bool, anchor: Anchor, colour: Colour) {
        let (weight, size) = (FontWeight::Regular, if large { RasterHeight::Size20 } else { RasterHeight::Size16 });
        let advance = get_raster_width(weight, size);
        let width = (advance * text.chars().count()) as f64;
        let shift = match anchor {
            Anchor::Start => 0.0,
            Anchor::Middle => width / 2.0,
            Anchor::End => width,
        };
        let left = (at.0 - shift).round() as i64;
        let top = (at.1 - size.val() as f64 / 2.0).round() as i64;
        for (i, c) in text.chars().enumerate() {
            // The font holds Latin letters; anything else shows as a question mark.
            let Some(letter) = get_raster(c, weight, size).or_else(|| get_raster('?', weight, size)) else { continue };
            for (row, values) in letter.rows().enumerate() {
                for (column, value) in values.iter().enumerate() {
                    let (x, y) = (left + (i * advance + column) as i64, top + row as i64);
                    if *value > 0 && (0..WIDTH as i64).contains(&x) && (0..HEIGHT as i64).contains(&y) {
                        mix(&mut self.pixels[y as usize * WIDTH + x as usize], colour, f32::from(*value) / 255.0);
                    }
                }
            }
        }
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, WIDTH as u32, HEIGHT as u32);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        // Writing to memory fails for wrong sizes only, and these are constants.
        let mut writer = encoder.write_header().expect("the size is not zero");
        writer.write_image_data(self.pixels.as_flattened()).expect("as many bytes as the header says");
        drop(writer);
        bytes
    }
}

/// The pixels whose middle may lie between `from` and `to`, within the clip and the picture.
fn pixels(from: f64, to: f64, low: f64, high: f64, size: usize) -> std::ops::Range<usize> {
    let first = from.max(low).floor().clamp(0.0, size as f64) as usize;
    let last = to.min(high).ceil().clamp(0.0, size as f64) as usize;
    first..last.max(first)
}

fn mix(pixel: &mut Colour, colour: Colour, share: f32) {
    for (old, new) in pixel.iter_mut().zip(colour) {
        *old = (f32::from(*old) * (1.0 - share) + f32::from(new) * share).round() as u8;
    }
}
