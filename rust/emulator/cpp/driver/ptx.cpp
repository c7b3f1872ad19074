#include "ptx.h"

#include <cctype>
#include <cstdlib>
#include <sstream>

namespace kvrelay_emulated {
namespace {

bool is_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$'; }

// Bytes of a type such as .u64; 0 for what is none.
uint32_t bytes_of_type(const std::string& word) {
    if (word.size() < 3 || word[0] != '.' || std::string("usbf").find(word[1]) == std::string::npos) {
        return 0;
    }
    char* end = nullptr;
    const long bits = std::strtol(word.c_str() + 2, &end, 10);
    const bool known = bits == 8 || bits == 16 || bits == 32 || bits == 64;
    return *end == '\0' && known ? static_cast<uint32_t>(bits / 8) : 0;
}

// Of `.param .u32 name` or `.param .align 8 .b8 name[24]`.
uint32_t bytes_of_parameter(const std::string& declaration) {
    std::istringstream words(declaration);
    uint32_t bytes = 0;
    for (std::string word; words >> word;) {
        if (const uint32_t of_type = bytes_of_type(word)) {
            bytes = of_type;
        }
    }
    const size_t bracket = declaration.find('[');
    const long count = bracket == std::string::npos ? 1 : std::strtol(declaration.c_str() + bracket + 1, nullptr, 10);
    return bytes * static_cast<uint32_t>(count);
}

std::vector<uint32_t> bytes_of_parameters(const std::string& list) {
    std::vector<uint32_t> sizes;
    std::istringstream declarations(list);
    for (std::string one; std::getline(declarations, one, ',');) {
        if (one.find(".param") != std::string::npos) {
            sizes.push_back(bytes_of_parameter(one));
        }
    }
    return sizes;
}

// `.maxntid 128, 1, 1`, the product; 0 without it.
uint32_t max_threads(const std::string& directives) {
    const size_t at = directives.find(".maxntid");
    if (at == std::string::npos) {
        return 0;
    }
    const char* text = directives.c_str() + at + std::string(".maxntid").size();
    uint32_t product = 1;
    for (char* end = nullptr;; text = end + 1) {
        product *= static_cast<uint32_t>(std::strtoul(text, &end, 10));
        while (*end == ' ') {
            ++end;
        }
        if (*end != ',') {
            return product;
        }
    }
}

}  // namespace

std::optional<Ptx> Ptx::read(std::string text) {
    const size_t version = text.find(".version "), target = text.find(".target sm_");
    if (version == std::string::npos || target == std::string::npos) {
        return std::nullopt;
    }
    Ptx ptx;
    char* end = nullptr;
    const long major = std::strtol(text.c_str() + version + 9, &end, 10);
    const long minor = *end == '.' ? std::strtol(end + 1, nullptr, 10) : 0;
    ptx.version_ = static_cast<int>(major * 10 + minor);
    ptx.target_ = std::atoi(text.c_str() + target + 11);
    ptx.text_ = std::move(text);
    return ptx;
}

std::optional<PtxEntry> Ptx::entry(const std::string& name) const {
    const std::string key = ".entry " + name;
    size_t at = text_.find(key);
    while (at != std::string::npos && is_name(text_[at + key.size()])) {
        at = text_.find(key, at + key.size());
    }
    if (at == std::string::npos) {
        return std::nullopt;
    }
    const size_t begin = at + key.size(), body = text_.find('{', begin);
    std::string header = text_.substr(begin, body - begin);
    PtxEntry entry;
    const size_t close = header.find(')');
    if (close != std::string::npos) {
        entry.sizes = bytes_of_parameters(header.substr(header.find('(') + 1, close - header.find('(') - 1));
        header.erase(0, close + 1);
    }
    entry.max_threads = max_threads(header);
    return entry;
}

}  // namespace kvrelay_emulated
