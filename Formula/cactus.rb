class Cactus < Formula
  desc "Run language models on ordinary CPUs, in 1 to 4 bits per weight"
  homepage "https://github.com/cactus-compute/cactus"
  url "https://github.com/cactus-compute/cactus.git", tag: "v0.1.0"
  license "MIT"
  head "https://github.com/cactus-compute/cactus.git", branch: "main"

  depends_on "rust" => :build

  def install
    system "cargo", "install", *std_cargo_args
    generate_completions_from_executable(bin/"cactus", "completions")
    (buildpath/"cactus.1").write Utils.safe_popen_read(bin/"cactus", "man")
    man1.install "cactus.1"
  end

  test do
    # The test must not use models or settings of the user.
    ENV["CACTUS_HOME"] = testpath/"cactus"
    assert_match(/^cactus \d/, shell_output("#{bin}/cactus --version"))
    assert_match "no models yet", shell_output("#{bin}/cactus list 2>&1")
    assert_equal "[]", shell_output("#{bin}/cactus list --json").strip
    # Asked wrongly: exit code 2. A file that is not there: exit code 1.
    assert_match "--bits", shell_output("#{bin}/cactus run --bits 7 --prompt x 2>&1 </dev/null", 2)
    assert_match "no file or folder", shell_output("#{bin}/cactus run ./none.gguf --prompt x 2>&1 </dev/null", 1)
  end
end
